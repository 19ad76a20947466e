// RoPE on the host: turns keys and queries by whole positions.

#pragma once

#include "rope.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvtool {

struct layer;

// how a layer's keys are rotated, in numbers alone: nothing of it lies in a model
struct rotation {
    rotation() = default;

    // n_map: the size of the map that quantized keys are stored under
    rotation(const layer & l, int n_map);

    kvtool::rope rope; // its tensors are null

    int n_map = 0; // 0: there is no map

    std::vector<float> factors; // what the rope's tensors hold
    std::vector<float> scale;
};

class turns {
public:
    turns() = default;

    // the rotation of keys of n_embd numbers, for turns by less than n_most positions either way
    turns(const rotation & r, int64_t n_embd, int n_most);

    // takes the tables of another one that turns alike: those of all layers would not stay in a processor's cache
    void share(const turns & other);

    // rotates a key by delta positions
    void turn(float * key, int64_t delta) const { turn(key, delta, scale, unscale); }

    // rotates a query, so that its product with a key becomes that with a key rotated the other way
    void turn_query(float * query, int64_t delta) const { turn(query, delta, unscale, scale); }

    // all numbers turn and nothing else is done to them, so that keys can be turned while they are multiplied
    bool is_plain() const { return n_pair > 0 && first == 0 && 2*n_pair == n_embd && n_map == 0 && scale.empty(); }
    bool are_halves() const { return is_neox; }

    // of turns by 0 .. n_small - 1 positions, in a row of their own: what each number is multiplied by, then what the other one
    // of its pair is
    const float * small_turns() const { return rows->small.data(); }

    static constexpr int n_small = 256;

private:
    bool is_neox = false;
    int  first   = 0; // in a key, the first number that turns
    int  n_pair  = 0; // none: the layer has no RoPE
    int  n_map   = 0;

    int64_t n_embd = 0;

    // the map, which undoes itself
    void map(float * x) const;

    int at(int pair, bool second) const;

    // adds the row of a turn by delta positions to a table: cosines, then sines, which are negative for the first of a pair
    void add_row(std::vector<float> & table, int64_t delta) const;

    // what each number of a key is multiplied by behind its rotation, and what undoes that; none: by nothing
    std::vector<float> scale;
    std::vector<float> unscale;

    // before, after: what undoes a scale, and what does it again
    void turn(float * x, int64_t delta, const std::vector<float> & after, const std::vector<float> & before) const;

    std::vector<double> omega; // [n_pair], radians a position

    // turns by 0 .. n_small - 1 positions, and by multiples of n_small
    struct tables {
        std::vector<float> small;
        std::vector<float> large;

        int first_large = 0; // the multiple that `large` begins with
    };

    std::shared_ptr<const tables> rows;
};

} // namespace kvtool
