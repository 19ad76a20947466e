// Error that is thrown if there is no memory or disk space for an archive.

#pragma once

#include <stdexcept>

namespace kvtool {

struct out_of_space : std::runtime_error {
    using std::runtime_error::runtime_error;
};

} // namespace kvtool
