// Error of an archive that finds no memory or no disk space.

#pragma once

#include <stdexcept>

namespace kvtool {

struct no_room : std::runtime_error {
    using std::runtime_error::runtime_error;
};

} // namespace kvtool
