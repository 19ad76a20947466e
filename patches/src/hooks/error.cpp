#include "error.h"

static thread_local std::string g_error;

int32_t kvtool::fail(const std::string & why) {
    g_error = why;
    return -1;
}

const char * llama_kvtool_error(void) {
    return g_error.c_str();
}
