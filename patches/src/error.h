// Errors of the C API: a failing call returns a negative number, and llama_kvtool_error gives the reason.

#pragma once

#include "llama-kvtool.h"

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace kvtool {

// set the text of llama_kvtool_error on this thread; returns -1
int32_t fail(const std::string & why);

// no memory or no disk space for the archive
struct no_room : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// result of f, or a negative number if f throws: no exception may cross into C
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
