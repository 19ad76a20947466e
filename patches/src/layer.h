// A layer of the cache that kvtool edits.

#pragma once

#include "ggml.h"

namespace kvtool {

struct layer {
    int il;     // its number in the model
    int n_head; // its KV heads, each of which is a row
    int row_0;  // the first of these rows
    int n_cell; // its cells

    ggml_tensor * k;
    ggml_tensor * v;
};

} // namespace kvtool
