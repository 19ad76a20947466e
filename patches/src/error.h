// How a call fails: it returns a negative number, and llama_kvtool_error says why.

#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace kvtool {

// sets what llama_kvtool_error says on this thread; returns -1
int32_t fail(const std::string & why);

// what f returns, or -1 where it throws: no exception may cross into C
template <typename F>
auto guarded(F && f) -> decltype(f()) {
    try {
        return f();
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

} // namespace kvtool
