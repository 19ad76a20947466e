// RoPE on the host: rotations of keys and queries by whole numbers of positions.

#pragma once

#include "cache/layer.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvtool {

// RoPE parameters of a layer's keys. The contents of the model's tensors are copied to host memory
struct rotation {
    rotation() = default;

    // n_map: size of the Hadamard matrix by which quantized keys are multiplied
    rotation(const layer & l, int n_map);

    kvtool::rope rope; // rope.factors and rope.scale are null; use the copies below instead

    int n_map = 0; // 0 if there is no matrix

    // copies of the tensors rope.factors and rope.scale; empty if the layer has no such tensor
    std::vector<float> factors;
    std::vector<float> scale;
};

class rotations {
public:
    rotations() = default;

    // r: RoPE parameters of keys with n_embd elements. The constructor computes tables for rotations by up to max_delta
    // positions in either direction; rotations by more positions take longer
    rotations(const rotation & r, int64_t n_embd, int max_delta);

    // Use the tables of another object if it has the same rotation. Separate tables for every layer would not fit in a
    // processor's cache
    void share(const rotations & other);

    // rotate a key by delta positions
    void rotate(float * key, int64_t delta) const { rotate(key, delta, scale, unscale); }

    // Rotate a query by delta positions. The product of the rotated query and a key equals the product of the original
    // query and a key that is rotated by -delta positions
    void rotate_query(float * query, int64_t delta) const { rotate(query, delta, unscale, scale); }

    // True if all elements are rotated and none is scaled. Keys can then be rotated while they are multiplied
    bool rotates_everything() const { return n_rotated() == n_embd && n_map == 0 && scale.empty(); }
    bool are_halves() const { return is_neox; }

    // Table of the rotations by 0 .. n_small - 1 positions. The row of a rotation has a cosine for each element, and
    // then a sine for each element. A rotated element is the element times its cosine, plus the other element of the
    // pair times the sine
    const float * small_rotations() const { return tables->small.data(); }

    // Prepare the products of a query with a key that is rotated by 0 .. n_small - 1 positions. The product with the
    // rotation by `delta` positions is the result, plus the sum of out[i]*pair_rotations()[delta*n_rotated() + i] over
    // n_rotated() elements. Call undo_query and undo_key first
    float multiply_pairs(const float * query, const float * key, float * out) const;

    // undo the multiplication by the cache's Hadamard matrix and the scaling of a key, or of a query for such a key
    void undo_query(float * query) const;
    void undo_key(float * key) const;

    // number of rotated elements
    int n_rotated() const { return 2*n_pair; }

    // rotations by 0 .. n_small - 1 positions: a cosine for each pair, and then a sine for each pair
    const float * pair_rotations() const { return tables ? tables->pairs.data() : nullptr; }

    static constexpr int n_small = 256;

private:
    bool is_neox = false;
    int  first   = 0; // Index of the first rotated element of a key.
    int  n_pair  = 0; // Number of rotated pairs of elements; 0 if the layer has no RoPE.
    int  n_map   = 0;

    int64_t n_embd = 0;

    int element(int pair, bool is_second) const;

    // Append the rotation by delta positions to a table: first the cosines, then the sines. The sine is negative for
    // the first element of a pair
    void add_row(std::vector<float> & table, int64_t delta) const;

    // scale: factor that multiplies each element of a key after its rotation; unscale: 1/scale. Both are empty if keys
    // are not scaled
    std::vector<float> scale;
    std::vector<float> unscale;

    // before, after: factors that are applied before and after the rotation
    void rotate(float * x, int64_t delta, const std::vector<float> & after, const std::vector<float> & before) const;

    std::vector<double> omega; // [n_pair], radians per position

    // small: rotations by 0 .. n_small - 1 positions; large: rotations by multiples of n_small; pairs: see
    // pair_rotations
    struct trig_tables {
        std::vector<float> small;
        std::vector<float> large;
        std::vector<float> pairs;

        int first_large = 0; // `large` begins with the rotation by first_large*n_small positions
    };

    std::shared_ptr<const trig_tables> tables;
};

} // namespace kvtool
