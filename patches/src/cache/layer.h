// One layer of the cache that kvtool edits.

#pragma once

#include "rope.h"

#include "ggml.h"

namespace kvtool {

struct layer {
    int il;     // Index of the layer in the model.
    int n_head; // Number of KV heads, which is also the number of rows.
    int row_0;  // Index of the layer's first row.
    int n_cell; // Number of cells.

    ggml_tensor * k;
    ggml_tensor * v; // null if values are a part of the keys (MLA)

    int n_embd_k; // Elements of a key of one head.
    int n_embd_v; // Elements of a value of one head. 0 without values.

    int il_last; // index of the last layer of the model that reads these cells

    kvtool::rope rope = {};
};

} // namespace kvtool
