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
static constexpr int64_t n_few = 4*n_block;

int64_t archive::bytes() const {
    int64_t res = memory.bytes();
    for (const auto & rows : clusters) {
        for (const auto & own : rows) {
            res += (own.end() - own.begin())*own.block_bytes();
        }
    }
    return res;
}

int64_t archive::slab_bytes() const {
    int64_t res = memory.slab_bytes();
    for (const auto & rows : clusters) {
        for (const auto & own : rows) {
            res += own.block_bytes();
        }
    }
    return res;
}

void archive::clear_clusters() {
    for (auto & rows : clusters) {
        for (auto & own : rows) {
            own.clear();
        }
    }
    known.clear();
    n_unsealed = 0;
}

int64_t archive::whole(int64_t begin, int64_t to, int64_t end) const {
    // The first row is clustered before the other rows: a block without clusters in the first row has no clusters in
    // any row
    const bool is_sealed = !clusters.empty() && to/n_block < clusters[0][0].end() && clusters[0][0].begin() < clusters[0][0].end();

    return !is_sealed || to <= begin || to % n_block == 0 ? to : std::min(archived_layer::block_end(to), end);
}

void archived_layer::sort(int head, int64_t block, int first, const uint8_t * from) {
    const int n = n_block - first;

    uint8_t * rows = key_at(head, block*n_block + first);
    const std::vector<uint8_t> old(rows, rows + n*size);
    for (int i = 0; i < n; ++i) {
        memcpy(rows + i*size, old.data() + (from[first + i] - first)*size, size);
    }
}

// for each token of a block, its place in the block
static std::array<uint8_t, n_block> places_of(const sealed_block & block) {
    std::array<uint8_t, n_block> res;
    for (int i = 0; i < n_block; ++i) {
        res[block.order[i]] = i;
    }
    return res;
}

int64_t archive::place_of(size_t layer, int head, int64_t i) const {
    const int64_t block = i/n_block;
    if (clusters.empty() || block < clusters[layer][head].begin() || block >= clusters[layer][head].end()) {
        return i;
    }
    const auto & order = clusters[layer][head][block].order;
    return block*n_block + (std::find(order.begin(), order.end(), i % n_block) - order.begin());
}

void archive::seal(size_t layer, int head, int row, int64_t block, bool is_far, std::vector<float> & keys, std::vector<float> & values) {
    auto & l   = layers[layer];
    auto & own = clusters[layer][head];

    const bool is_new = block == own.end() || own.begin() == own.end();

    const int     first = is_new ? std::max(begin() - block*n_block, (int64_t) 0) : own[block].first;
    const int     n     = n_block - first;
    const bearing to    = { is_far, is_far ? 0 : base_of((block + 1)*n_block - 1) };

    if (!is_new) {
        // put the block's tokens back into the order of the stream
        l.sort(head, block, first, places_of(own[block]).data());
    }

    keys  .resize(n*l.n_embd_k);
    values.resize(n*l.n_embd_v);
    this->keys(layer, head, block*n_block + first, n, nullptr, keys.data());
    l.values(head, block*n_block + first, n, values.data());
    for (int i = 0; i < n; ++i) {
        rope[layer].rotate(keys.data() + i*l.n_embd_k, rotation_to(to, block*n_block + first + i));
    }

    const auto found = known.find({ block, is_far });
    own.set(block, first, to, keys.data(), values.data(), found == known.end() ? nullptr : &found->second[row]);
    l.sort(head, block, first, own[block].order.data());
}

int archive::n_row() const {
    int res = 0;
    for (const auto & rows : clusters) {
        res += rows.size();
    }
    return res;
}

archive::row_span archive::span_of(int row) const {
    // Each row is clustered a little later than the row before it, so that no step has to wait for all rows. The delay
    // is at most a quarter of a block: a longer delay would make steps slower, because they attend exactly to all
    // tokens without clusters
    const int64_t late = (int64_t) row*(n_block/4)/n_row();

    return { (far - late)/n_block, n_most < n_few ? 0 : (end() - late)/n_block };
}

void archive::seal_row(int row) {
    size_t i = 0;
    int head = row;
    for (; head >= layers[i].n_head; ++i) {
        head -= layers[i].n_head;
    }

    auto & own = clusters[i][head];

    std::vector<float> keys, values;

    const auto [near, to] = span_of(row);

    own.forget(begin()/n_block);
    // after a rewind, the blocks from `to` on lose their clusters: put their tokens back into the order of the stream
    for (int64_t block = std::max(to, own.begin()); block < own.end() && block*n_block < end(); ++block) {
        layers[i].sort(head, block, own[block].first, places_of(own[block]).data());
    }
    own.cut(to);
    for (int64_t block = own.begin(); block < own.end(); ++block) {
        if (own[block].to.is_far != (block < near)) {
            seal(i, head, row, block, block < near, keys, values);
        }
    }
    if (own.begin() == own.end() && begin()/n_block < to) {
        own.reserve(begin()/n_block, to);
    }
    for (int64_t block = own.begin() < own.end() ? own.end() : begin()/n_block; block < to; ++block) {
        seal(i, head, row, block, block < near, keys, values);
    }
}

void archive::seal(int n_thread) {
    parallel_for(n_thread, n_row(), [&](int row) { seal_row(row); });
    known.clear();
    n_unsealed = 0;
}

void archive::defer_seal(bool on, int n_thread) {
    is_deferred = on;
    if (!on && size() > 0) {
        seal(n_thread);
    }
}

void archive::seal_layer(size_t layer, int head) {
    int row = head;
    for (size_t i = 0; i < layer; ++i) {
        row += layers[i].n_head;
    }
    seal_row(row);
}

int archive::seal_some(int64_t n_max, int n_thread) {
    if (n_unsealed == 0) {
        return 0;
    }
    n_most = n_max;

    const int end   = n_row();
    const int begin = end - n_unsealed;
    const int stop  = std::min(end, begin + 2*n_thread);

    parallel_for(n_thread, stop - begin, [&](int i) { seal_row(begin + i); });

    n_unsealed = end - stop;
    if (n_unsealed == 0) {
        known.clear();
    }
    return n_unsealed;
}

std::array<int64_t, 4> archive::clustered() const {
    if (clusters.empty() || size() == 0 || n_unsealed > 0 || n_most < n_few) {
        return {};
    }
    // Rows are clustered in order. If a block has the same kind of clusters in the first row and in the last row, all
    // rows between them also have this kind
    const row_span one  = span_of(0);
    const row_span last = span_of(n_row() - 1);

    const int64_t begin = this->begin()/n_block;
    const int64_t end   = std::max(begin, last.to);
    return {
        begin*n_block,
        std::max(begin, last.far)*n_block,
        std::clamp(one.far, begin, end)*n_block,
        end*n_block,
    };
}

bool archive::get_clusters(uint8_t * out, int64_t begin, int64_t end, bool is_far) const {
    for (int64_t block = begin/n_block; block < end/n_block; ++block) {
        for (const auto & rows : clusters) {
            for (const auto & own : rows) {
                // until all rows are clustered, a block's clusters may belong to tokens that the block held earlier
                if (n_unsealed > 0 || block < own.begin() || block >= own.end() || own[block].to.is_far != is_far) {
                    return false;
                }
                const auto of = own[block].members();
                out = std::copy(of.begin(), of.end(), out);
            }
        }
    }
    return true;
}

void archive::set_clusters(const uint8_t * in, int64_t begin, int64_t end, bool is_far) {
    for (int64_t block = begin/n_block; block < end/n_block; ++block) {
        auto & rows = known[{ block, is_far }];
        rows.resize(n_row());
        for (auto & of : rows) {
            std::copy_n(in, of.size(), of.begin());
            in += of.size();
        }
    }
}

void archive::get(size_t layer, uint8_t * out, int64_t begin, int64_t end) const {
    const auto & l = layers[layer];

    for (int head = 0; head < l.n_head; ++head) {
        for (int64_t i = begin, block; i < end; i = (block + 1)*n_block) {
            block = i/n_block;

            const auto * own = clusters.empty() ? nullptr : &clusters[layer][head];
            const bool is_sealed = own && own->begin() <= block && block < own->end();

            std::array<uint8_t, n_block> places {};
            if (is_sealed) {
                places = places_of((*own)[block]);
            }
            for (int64_t t = i; t < std::min(end, (block + 1)*n_block); ++t) {
                const int64_t at = is_sealed ? block*n_block + places[t % n_block] : t;
                memcpy(out + ((t - begin)*l.n_head + head)*l.size, l.raw_key(head, at), l.size);
            }
        }
    }
}

} // namespace kvtool
