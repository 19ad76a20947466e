// Clusters of an archive. When a block is complete it is clustered ("sealed"): its tokens are stored in the order of
// their clusters.

#include "archive.h"

#include "parallel.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace kvtool {

// Archives with a smaller maximum size have no clusters. All their tokens are attended to exactly, and old tokens are
// deleted one by one
static constexpr int64_t n_min_clustered = 4*n_block;

int64_t archive::bytes() const {
    int64_t res = memory.bytes();
    for (const auto & rows : clusters) {
        for (const auto & row : rows) {
            res += (row.end() - row.begin())*row.block_bytes();
        }
    }
    return res;
}

int64_t archive::slab_bytes() const {
    int64_t res = memory.slab_bytes();
    for (const auto & rows : clusters) {
        for (const auto & row : rows) {
            res += row.block_bytes();
        }
    }
    return res;
}

void archive::clear_clusters() {
    for (auto & rows : clusters) {
        for (auto & row : rows) {
            row.clear();
        }
    }
    saved_members.clear();
    n_unsealed = 0;
}

int64_t archive::first_kept(int64_t begin, int64_t first, int64_t end) const {
    // The first row is clustered before the other rows: a block without clusters in the first row has no clusters in
    // any row
    const bool is_sealed = !clusters.empty() && first/n_block < clusters[0][0].end() && clusters[0][0].begin() < clusters[0][0].end();

    return !is_sealed || first <= begin || first % n_block == 0 ? first : std::min(archived_layer::block_end(first), end);
}

void archived_layer::sort(int head, int64_t block, int first, const uint8_t * src) {
    const int n = n_block - first;

    uint8_t * rows = key_at(head, block*n_block + first);
    const std::vector<uint8_t> old(rows, rows + n*size);
    for (int i = 0; i < n; ++i) {
        memcpy(rows + i*size, old.data() + (src[first + i] - first)*size, size);
    }
}

// for each token of a block, its slot in the block
static std::array<uint8_t, n_block> slots_of(const sealed_block & block) {
    std::array<uint8_t, n_block> res;
    for (int i = 0; i < n_block; ++i) {
        res[block.order[i]] = i;
    }
    return res;
}

int64_t archive::slot_of(size_t layer, int head, int64_t i) const {
    const int64_t   block = i/n_block;
    const uint8_t * order = order_of(layer, head, block);
    return order ? block*n_block + (std::find(order, order + n_block, i % n_block) - order) : i;
}

const uint8_t * archive::order_of(size_t layer, int head, int64_t block) const {
    if (clusters.empty()) {
        return nullptr;
    }
    const auto & row = clusters[layer][head];
    return block >= row.begin() && block < row.end() ? row[block].order.data() : nullptr;
}

void archive::seal_block(size_t layer, int head, int i_row, int64_t block, bool is_far, std::vector<float> & keys, std::vector<float> & values) {
    auto & l   = layers[layer];
    auto & row = clusters[layer][head];

    const bool is_new = block == row.end() || row.begin() == row.end();

    const int        first  = is_new ? std::max(begin() - block*n_block, (int64_t) 0) : row[block].first;
    const int        n      = n_block - first;
    const key_origin origin = { is_far, is_far ? 0 : base_of((block + 1)*n_block - 1) };

    if (!is_new) {
        // put the block's tokens back into the order of the stream
        l.sort(head, block, first, slots_of(row[block]).data());
    }

    keys  .resize(n*l.n_embd_k);
    values.resize(n*l.n_embd_v);
    this->keys(layer, head, block*n_block + first, n, nullptr, keys.data());
    l.values(head, block*n_block + first, n, values.data());
    for (int i = 0; i < n; ++i) {
        rope[layer].rotate(keys.data() + i*l.n_embd_k, rotation_to(origin, block*n_block + first + i));
    }

    const auto saved = saved_members.find({ block, is_far });
    row.set(block, first, origin, keys.data(), values.data(), saved == saved_members.end() ? nullptr : &saved->second[i_row]);
    l.sort(head, block, first, row[block].order.data());
}

int archive::n_row() const {
    int res = 0;
    for (const auto & rows : clusters) {
        res += rows.size();
    }
    return res;
}

archive::row_span archive::span_of(int i_row) const {
    // Each row is clustered a little later than the row before it, so that no step has to wait for all rows. The delay
    // is at most a quarter of a block: a longer delay would make steps slower, because they attend exactly to all
    // tokens without clusters
    const int64_t delay = (int64_t) i_row*(n_block/4)/n_row();

    return { (far - delay)/n_block, n_max < n_min_clustered ? 0 : (end() - delay)/n_block };
}

void archive::seal_row(int i_row) {
    size_t i = 0;
    int head = i_row;
    for (; head >= layers[i].n_head; ++i) {
        head -= layers[i].n_head;
    }

    auto & row = clusters[i][head];

    std::vector<float> keys, values;

    const row_span span = span_of(i_row);

    row.forget(begin()/n_block);
    // after a rewind, the blocks from span.end on lose their clusters: put their tokens back into the order of the
    // stream
    for (int64_t block = std::max(span.end, row.begin()); block < row.end() && block*n_block < end(); ++block) {
        layers[i].sort(head, block, row[block].first, slots_of(row[block]).data());
    }
    row.cut(span.end);
    for (int64_t block = row.begin(); block < row.end(); ++block) {
        const bool is_far = block < span.far_end;
        if (row[block].origin.is_far != is_far) {
            seal_block(i, head, i_row, block, is_far, keys, values);
        }
    }
    if (row.begin() == row.end() && begin()/n_block < span.end) {
        row.reserve(begin()/n_block, span.end);
    }
    for (int64_t block = row.begin() < row.end() ? row.end() : begin()/n_block; block < span.end; ++block) {
        seal_block(i, head, i_row, block, block < span.far_end, keys, values);
    }
}

void archive::seal_all(int n_thread) {
    parallel_for(n_thread, n_row(), [&](int i_row) { seal_row(i_row); });
    saved_members.clear();
    n_unsealed = 0;
}

void archive::defer_seal(bool on, int n_thread) {
    is_deferred = on;
    if (!on && size() > 0) {
        seal_all(n_thread);
    }
}

void archive::seal_row(size_t layer, int head) {
    int i_row = head;
    for (size_t i = 0; i < layer; ++i) {
        i_row += layers[i].n_head;
    }
    seal_row(i_row);
}

int archive::seal_next_rows(int64_t n_max, int n_thread) {
    if (n_unsealed == 0) {
        return 0;
    }
    this->n_max = n_max;

    const int end   = n_row();
    const int begin = end - n_unsealed;
    const int stop  = std::min(end, begin + 2*n_thread);

    parallel_for(n_thread, stop - begin, [&](int i) { seal_row(begin + i); });

    n_unsealed = end - stop;
    if (n_unsealed == 0) {
        saved_members.clear();
    }
    return n_unsealed;
}

std::array<int64_t, 4> archive::clustered() const {
    if (clusters.empty() || size() == 0 || n_unsealed > 0 || n_max < n_min_clustered) {
        return {};
    }
    // Rows are clustered in order. If a block has the same kind of clusters in the first row and in the last row, all
    // rows between them also have this kind
    const row_span first = span_of(0);
    const row_span last  = span_of(n_row() - 1);

    const int64_t begin = this->begin()/n_block;
    const int64_t end   = std::max(begin, last.end);
    return {
        begin*n_block,
        std::max(begin, last.far_end)*n_block,
        std::clamp(first.far_end, begin, end)*n_block,
        end*n_block,
    };
}

bool archive::get_clusters(uint8_t * out, int64_t begin, int64_t end, bool is_far) const {
    for (int64_t block = begin/n_block; block < end/n_block; ++block) {
        for (const auto & rows : clusters) {
            for (const auto & row : rows) {
                // until all rows are clustered, a block's clusters may belong to tokens that the block held earlier
                if (n_unsealed > 0 || block < row.begin() || block >= row.end() || row[block].origin.is_far != is_far) {
                    return false;
                }
                const auto members = row[block].members();
                out = std::copy(members.begin(), members.end(), out);
            }
        }
    }
    return true;
}

void archive::set_clusters(const uint8_t * in, int64_t begin, int64_t end, bool is_far) {
    for (int64_t block = begin/n_block; block < end/n_block; ++block) {
        auto & rows = saved_members[{ block, is_far }];
        rows.resize(n_row());
        for (auto & members : rows) {
            std::copy_n(in, members.size(), members.begin());
            in += members.size();
        }
    }
}

void archive::get(size_t layer, uint8_t * out, int64_t begin, int64_t end) const {
    const auto & l = layers[layer];

    for (int head = 0; head < l.n_head; ++head) {
        for (int64_t i = begin, block; i < end; i = (block + 1)*n_block) {
            block = i/n_block;

            const auto * row = clusters.empty() ? nullptr : &clusters[layer][head];
            const bool is_sealed = row && row->begin() <= block && block < row->end();

            std::array<uint8_t, n_block> slots {};
            if (is_sealed) {
                slots = slots_of((*row)[block]);
            }
            for (int64_t t = i; t < std::min(end, (block + 1)*n_block); ++t) {
                const int64_t slot = is_sealed ? block*n_block + slots[t % n_block] : t;
                memcpy(out + ((t - begin)*l.n_head + head)*l.size, l.raw_key(head, slot), l.size);
            }
        }
    }
}

} // namespace kvtool
