// GCC before 14 tells its optimizer too little of what AMX's intrinsics touch: of 64 bytes of tile configuration that
// one reads 8, of the memory that a tile is read from or stored to nothing. It drops the stores that it takes to be dead:
// ggml's AMX kernels then die of an invalid configuration, or give garbage. Put before the files of ggml-cpu.

#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero

// a tile is a number, which may come as a macro
#define kvtool_tile_load(tile, base, stride) \
    __asm__ volatile ("tileloadd (%0,%1,1), %%tmm" #tile :: "r" ((const void *) (base)), "r" ((long) (stride)) : "memory")
#define kvtool_tile_store(tile, base, stride) \
    __asm__ volatile ("tilestored %%tmm" #tile ", (%0,%1,1)" :: "r" ((void *) (base)), "r" ((long) (stride)) : "memory")
#define kvtool_tile_zero(tile) \
    __asm__ volatile ("tilezero %%tmm" #tile ::: "memory")

#define _tile_loadconfig(config)        __asm__ volatile ("ldtilecfg %0" :: "m" (*(const char (*)[64]) (config)))
#define _tile_loadd(tile, base, stride) kvtool_tile_load(tile, base, stride)
#define _tile_stored(tile, base, stride) kvtool_tile_store(tile, base, stride)
#define _tile_zero(tile)                kvtool_tile_zero(tile)

#endif
