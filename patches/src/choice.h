// The choice among archived tokens: those that a layer's queries attend to most.

#pragma once

#include "archive.h"
#include "index.h"
#include "meeting.h"
#include "softmax.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// What the threads that choose for a layer share: each takes some of the archived tokens, so that all have work where there
// are few rows.
class choice_work : public meeting {
public:
    // of the queries that are looked at together, each with one for every tile; the next ones use the other
    std::vector<softmax_part> parts[2];

    std::vector<float> powers; // the same for every token, n_tile a tile
    std::vector<float> score;  // [n_head][tokens]
};

// a thread's part in the choice among the archived tokens of a layer
class choice {
public:
    // rot: what the first query is rotated to
    choice(const archive & all, size_t i, int64_t rot, choice_work & work, int ith, int nth);

    // for so many queries; one thread calls it, before any adds scores
    void make_room(int n_query);

    // Scores all tokens for a row; all threads call it. A token's score is the sum over the queries of its probability, in a
    // softmax over the archived tokens and the live cells.
    // queries: [n_query][n_embd]; live[n_query]: the log of the sum of the live cells' exponentials; scale: of the products
    void set_scores(int head, const std::vector<float> & queries, const std::vector<float> & live, float scale);

    // the k tokens with the highest scores, the oldest first; among equal scores the newer one is chosen
    const std::vector<int64_t> & choose(int head, int k);

    // how far a chosen token's key turns, to have its distance from the first query, whose key is rotated to rot
    int64_t turn_of(int64_t i, int64_t rot) const;

private:
    // tokens whose keys are rotated alike, and the queries turned to them
    struct turned {
        stretch of;

        std::vector<float>       queries; // [n_query][n_embd]
        std::vector<small_query> small;   // with an index
    };

    // tokens of one stretch and one block
    struct tile {
        const turned * from;
        int64_t begin;
        int     n;
    };

    const archive        & all;
    const archived_layer & l;
    const turns          & rope;

    choice_work & work;
    const int     ith;
    const int     nth;

    int n_round = 0; // of queries that are looked at together

    std::vector<turned> stretches;
    std::vector<tile>    tiles;
    std::vector<float>   keys; // of a tile
    std::vector<float>   some;
    std::vector<int64_t> chosen;

    // turns the queries to what each stretch's keys are rotated to
    void turn(const std::vector<float> & queries);

    // out[n]: the products of a query with the tile's keys; out has room for two more sides
    float * multiply(int head, const tile & t, int q, float * out) const;

    void select(const float * score, int k);
};

} // namespace kvtool
