#include "edit-host.h"

#include "archive/convert.h"
#include "hooks/state.h"

#include <algorithm>
#include <cstring>

namespace kvtool {

// A tensor of keys or values in host memory. Each key or value consists of n_piece pieces of n_elem elements. A
// transposed value has one piece per element. Keys, and values that are not transposed, have a single piece
struct host_view {
    ggml_tensor * t;

    int     row_0;
    int     n_piece;
    int64_t n_elem;

    size_t stride_cell;
    size_t stride_head;
    size_t stride_piece;

    size_t size() const {
        return ggml_row_size(t->type, n_elem);
    }

    uint8_t * at(int row, int cell, int i) const {
        return (uint8_t *) t->data + cell*stride_cell + (row - row_0)*stride_head + i*stride_piece;
    }
};

// sort the list by row, and call f(first, last) with the entries of each row
template <typename T, typename F>
static void for_each_row(const std::vector<T> & list, F && f) {
    const auto before = [](const T & a, const T & b) { return a.row < b.row; };

    if (!std::is_sorted(list.begin(), list.end(), before)) {
        auto sorted = list;
        std::stable_sort(sorted.begin(), sorted.end(), before);
        return for_each_row(sorted, f);
    }
    for (auto first = list.begin(); first != list.end(); ) {
        const auto last = std::find_if(first, list.end(), [&](const T & x) { return x.row != first->row; });
        f(first, last);
        first = last;
    }
}

// Access to the cells of a row, piece by piece (see host_view). Callers copy piece i of all cells before piece i + 1:
// if values are transposed, piece i of all cells is close together in memory. SIZE: bytes of a piece; 0 if known only
// at run time. With a known size, the compiler copies the 2 bytes of a transposed value inline, which is faster than a
// call of memcpy
template <size_t SIZE>
struct pieces {
    const host_view & view;

    size_t size()   const { return SIZE ? SIZE : view.size(); }
    size_t stride() const { return SIZE ? SIZE : view.stride_cell; }

    // copy piece i of these cells to a list with `step` bytes per entry
    void get(int row, const std::vector<int32_t> & cells, int i, uint8_t * list, size_t step) const {
        const uint8_t * src = view.at(row, 0, i);
        for (const int32_t cell : cells) {
            memcpy(list, src + cell*stride(), size());
            list += step;
        }
    }

    // copy piece i from the list to these cells
    void set(int row, const std::vector<int32_t> & cells, int i, const uint8_t * list, size_t step) const {
        uint8_t * dst = view.at(row, 0, i);
        for (const int32_t cell : cells) {
            memcpy(dst + cell*stride(), list, size());
            list += step;
        }
    }
};

template <typename F>
static void with_pieces(const host_view & view, F && f) {
    if (view.stride_cell == 2 && view.size() == 2) {
        f(pieces<2> { view });
    } else {
        f(pieces<0> { view });
    }
}

template <typename P>
static void move_host(const std::vector<llama_kvtool_move> & moves, const P & pieces) {
    std::vector<int32_t> src;
    std::vector<int32_t> dst;
    std::vector<uint8_t> raw;

    const size_t size = pieces.size();

    for_each_row(moves, [&](auto first, auto last) {
        src.clear();
        dst.clear();
        for (auto m = first; m != last; ++m) {
            src.push_back(m->src);
            dst.push_back(m->dst);
        }
        raw.resize(src.size()*size);

        for (int i = 0; i < pieces.view.n_piece; ++i) {
            pieces.get(first->row, src, i, raw.data(), size);
            pieces.set(first->row, dst, i, raw.data(), size);
        }
    });
}

template <typename P>
static void merge_host(const std::vector<llama_kvtool_term> & terms, const P & pieces) {
    const auto & view = pieces.view;

    const size_t  size       = pieces.size();
    const size_t  value_size = size*view.n_piece;
    const int64_t n_embd     = view.n_elem*view.n_piece;

    std::vector<int32_t> src;
    std::vector<int32_t> dst;
    std::vector<uint8_t> raw;
    std::vector<float>   x;
    std::vector<float>   sum;

    for_each_row(terms, [&](auto first, auto last) {
        src.clear();
        dst.clear();
        for (auto t = first; t != last; ++t) {
            src.push_back(t->src);
            if (t == first || t->dst != dst.back()) {
                dst.push_back(t->dst);
            }
        }

        raw.resize(src.size()*value_size);
        x  .resize(src.size()*n_embd);

        // in `raw` the pieces of a value are always consecutive; in the cache they may not be
        for (int i = 0; i < view.n_piece; ++i) {
            pieces.get(first->row, src, i, raw.data() + i*size, value_size);
        }
        to_float(view.t->type, raw.data(), x.data(), x.size());

        sum.assign(dst.size()*n_embd, 0.0f);

        float * dst_sum = sum.data();
        for (size_t j = 0; j < src.size(); ++j) {
            dst_sum += j > 0 && first[j].dst != first[j - 1].dst ? n_embd : 0;

            const float   weight = first[j].weight;
            const float * value  = x.data() + j*n_embd;
            for (int64_t k = 0; k < n_embd; ++k) {
                dst_sum[k] += weight*value[k];
            }
        }

        from_float(view.t->type, sum.data(), raw.data(), sum.size());
        for (int i = 0; i < view.n_piece; ++i) {
            pieces.set(first->row, dst, i, raw.data() + i*size, value_size);
        }
    });
}

void edit_host(const llama_kvtool & kvtool, const std::vector<layer_edit> & edits, bool with_k, bool with_v) {
    for (size_t i = 0; i < kvtool.layers.size(); ++i) {
        const auto & l = kvtool.layers[i];

        if (with_k) {
            const int64_t n_embd = l.n_embd_k;
            const size_t  size   = ggml_row_size(l.k->type, n_embd);

            with_pieces({ l.k, l.row_0, 1, n_embd, l.k->nb[1], size, 0 }, [&](const auto & pieces) {
                move_host(edits[i].moves, pieces);
            });
        }
        if (with_v && l.v) {
            const int64_t n_embd    = l.n_embd_v;
            const size_t  size      = ggml_row_size(l.v->type, n_embd);
            const size_t  elem_size = ggml_type_size(l.v->type);

            const host_view view = kvtool.v_trans
                ? host_view { l.v, l.row_0, (int) n_embd, 1, elem_size, n_embd*l.n_cell*elem_size, l.n_cell*elem_size }
                : host_view { l.v, l.row_0, 1, n_embd, l.v->nb[1], size, 0 };

            with_pieces(view, [&](const auto & pieces) {
                merge_host(edits[i].terms, pieces);
                move_host(values_moved(edits[i]), pieces);
            });
        }
    }
}

} // namespace kvtool
