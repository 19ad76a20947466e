// Expected attention of later queries, on the assumption that they resemble the last queries: statistics of logits.

#pragma once

#include <cstdint>

struct llama_context;
struct llama_kvtool;

namespace kvtool {

// see llama_kvtool_read_future
int32_t read_future(
        llama_kvtool & kvtool, llama_context & lctx, int32_t n_last, int64_t pos, float * mean, float * variance, int32_t n_head,
        int32_t n_cell);

} // namespace kvtool
