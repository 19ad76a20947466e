// One layer of the cache that kvtool edits.

#pragma once

#include "rope.h"

#include "ggml.h"

namespace kvtool {

struct layer {
    int il;     // index of the layer in the model
    int n_head; // KV heads; each is a row
    int row_0;  // index of the layer's first row
    int n_cell; // number of cells

    ggml_tensor * k;
    ggml_tensor * v; // null if values are a part of the keys (MLA)

    int n_embd_k; // elements of a key of one head
    int n_embd_v; // elements of a value of one head; 0 without values

    int last; // index of the last layer of the model that reads these cells

    kvtool::rope rope = {};
};

} // namespace kvtool
