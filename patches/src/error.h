// How a call fails: it returns a negative number, and llama_kvtool_error says why.

#pragma once

#include "llama-kvtool.h"

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace kvtool {

// sets what llama_kvtool_error says on this thread; returns -1
int32_t fail(const std::string & why);

// there is no memory for the archive, or no disk
struct no_room : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// what f returns, or a negative number where it throws: no exception may cross into C
template <typename F>
auto guarded(F && f) -> decltype(f()) {
    try {
        return f();
    } catch (const no_room & e) {
        fail(e.what());
        return LLAMA_KVTOOL_NO_ROOM;
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

} // namespace kvtool
