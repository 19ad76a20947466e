// A layer of the cache that kvtool edits.

#pragma once

#include "rope.h"

#include "ggml.h"

namespace kvtool {

struct layer {
    int il;     // its number in the model
    int n_head; // its KV heads, each of which is a row
    int row_0;  // the first of these rows
    int n_cell; // its cells

    ggml_tensor * k;
    ggml_tensor * v; // null: values are a part of the keys (MLA)

    int n_embd_k; // numbers in a key of one head
    int n_embd_v; // and in a value; 0 without values

    int last; // the last layer of the model that reads its cells, which may be a later one

    kvtool::rope rope = {};
};

} // namespace kvtool
