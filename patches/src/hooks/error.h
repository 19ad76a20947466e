// Errors of the C API: a failing call returns a negative number, and llama_kvtool_error gives the reason.

#pragma once

#include "archive/out-of-space.h"
#include "llama-kvtool.h"

#include <cstdint>
#include <exception>
#include <string>

namespace kvtool {

// set the text of llama_kvtool_error on this thread; returns -1
int32_t fail(const std::string & why);

// Return the result of f, or a negative number if f throws: no exception may reach C code
template <typename F>
auto guarded(F && f) -> decltype(f()) {
    try {
        return f();
    } catch (const out_of_space & e) {
        fail(e.what());
        return LLAMA_KVTOOL_NO_ROOM;
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

} // namespace kvtool
