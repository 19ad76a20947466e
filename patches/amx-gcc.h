// GCC before 14 does not know which memory AMX's intrinsics read and write. For a tile configuration, it assumes 8 of
// the 64 bytes. For loads and stores of tiles, it assumes no memory at all. Therefore, it removes stores that look
// unused. ggml's AMX kernels then crash on an invalid configuration, or compute wrong results. This file defines the
// intrinsics with the right memory operands. It is included before the files of ggml-cpu.

#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero

// These macros turn `tile` into a string, so it must already be a number. ggml passes macros such as TMM0, and
// _tile_loadd, _tile_stored and _tile_zero expand them to numbers
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
