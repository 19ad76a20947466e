// Joint steps of several contexts of one model. The tokens of all contexts go through the model's weights together, but
// each token attends only to the cells of its context.

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

// a context that takes part in a step
struct member {
    llama_context * lctx;

    int first; // index of its first token in the step
    int n;

    llama_pos pos_0; // position of its first token; -1 before `begin`

    llama_memory_context_ptr mctx;
};

// state of a context that computes joint steps
struct joint {
    int      n_member_max;  // Maximum number of members.
    uint32_t n_node_member; // Maximum number of nodes that a member adds to a graph.

    std::vector<bool>   layers;  // For each layer: true if its attention can be computed per member.
    std::vector<member> members; // Members of the current step.
};

// a member's part of a graph
struct member_graph {
    uint64_t version; // version of the tensors that this part views
    int      first;
    int      n;

    llm_graph_params params;

    std::unique_ptr<llm_graph_result>  res;   // Holds the part's inputs and signals.
    std::unique_ptr<llm_graph_context> graph; // Adds the part's nodes to the step's graph.

    llm_graph_input_i * attn = nullptr;
};

// inputs of all members; each member's inputs are filled from its batch
class joint_input : public llm_graph_input_i {
public:
    joint_input(const joint & state, const llm_graph_context & graph);

    void set_input(const llama_ubatch * ubatch) override;
    bool can_reuse(const llm_graph_params & params) override;

    const joint & state;

    std::vector<std::unique_ptr<member_graph>> parts;
};

} // namespace kvtool
