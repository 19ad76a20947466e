// Steps of several contexts of one model: their tokens go through its weights together, and each attends to its own cells alone.

#pragma once

#include "hooks.h"

#include "llama-graph.h"
#include "llama-memory.h"

#include <cstdint>
#include <memory>
#include <vector>

struct llama_batch;
struct llama_context;

namespace kvtool {

// one of the contexts of a step
struct member {
    llama_context * lctx;

    int first; // of the step's tokens: its own
    int n;

    llama_pos pos_0;

    llama_memory_context_ptr mctx;
};

// what a context has that computes such steps
struct joint {
    int      n_most; // members of a step
    uint32_t n_node; // that one of them adds to a graph

    std::vector<bool>   layers;  // those whose attention can be its members'
    std::vector<member> members; // of the step that is computed
};

// a member's part of a graph
struct member_graph {
    uint64_t version; // of what it views
    int      first;
    int      n;

    llm_graph_params params;

    std::unique_ptr<llm_graph_result>  res;   // holds its inputs and signals
    std::unique_ptr<llm_graph_context> graph; // builds into the step's graph

    llm_graph_input_i * attn = nullptr;
};

// the members' inputs, each of which is filled from its own batch
class joint_input : public llm_graph_input_i {
public:
    joint_input(const joint & own, const llm_graph_context & graph);

    void set_input(const llama_ubatch * ubatch) override;
    bool can_reuse(const llm_graph_params & params) override;

    const joint & own;

    std::vector<std::unique_ptr<member_graph>> parts;
};

} // namespace kvtool
