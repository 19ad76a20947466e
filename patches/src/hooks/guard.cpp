// Crash handlers: a crash prints one message and ends the process with an exit code.

#include "error.h"
#include "llama-kvtool.h"

#include "llama-impl.h"

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>

#if !defined(_WIN32)
#include <unistd.h>
#endif

static char g_message[4096];
static int  g_exit_code = 0;
static bool g_verbose   = false;

static std::atomic_flag g_ended = ATOMIC_FLAG_INIT;

// calls only functions that are safe in a signal handler
[[noreturn]] static void end_process() {
    if (g_ended.test_and_set()) {
        // another thread is ending the process
        for (;;) {
#if !defined(_WIN32)
            pause();
#endif
        }
    }
#if defined(_WIN32)
    fputs(g_message, stderr);
    fflush(stderr);
#else
    for (size_t i = 0, n = strlen(g_message); i < n; ) {
        const auto n_written = write(STDERR_FILENO, g_message + i, n - i);
        if (n_written <= 0) {
            break;
        }
        i += n_written;
    }
#endif
    std::_Exit(g_exit_code);
}

static void on_signal(int) {
    end_process();
}

static void on_abort(const char * why) {
    if (g_verbose) {
        fprintf(stderr, "%s\n", why);
    }
    end_process();
}

static void on_terminate() {
    if (g_verbose) {
        try {
            if (auto e = std::current_exception()) {
                std::rethrow_exception(e);
            }
        } catch (const std::exception & e) {
            fprintf(stderr, "uncaught exception: %s\n", e.what());
        } catch (...) {
            fprintf(stderr, "uncaught exception\n");
        }
    }
    end_process();
}

static constexpr int g_fatal[] = {
    SIGABRT, SIGFPE, SIGILL, SIGSEGV,
#if !defined(_WIN32)
    SIGBUS,
#endif
};

// previous handlers, restored when the guard is removed
struct guard_before {
    std::terminate_handler terminate;
    ggml_abort_callback_t  abort;
#if defined(_WIN32)
    void (*signals[std::size(g_fatal)])(int);
#else
    struct sigaction signals[std::size(g_fatal)];
#endif
};

static guard_before g_before;
static bool         g_guarding = false;

static void guard_on() {
#if defined(_WIN32)
    for (size_t i = 0; i < std::size(g_fatal); ++i) {
        g_before.signals[i] = signal(g_fatal[i], on_signal);
    }
#else
    // a handler needs a separate stack in case the stack has overflowed
    static char stack[1 << 16];
    stack_t new_stack = {};
    new_stack.ss_sp   = stack;
    new_stack.ss_size = sizeof(stack);
    stack_t old_stack = {};
    if (sigaltstack(nullptr, &old_stack) == 0 && (old_stack.ss_flags & SS_DISABLE)) {
        sigaltstack(&new_stack, nullptr);
    }

    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags   = SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < std::size(g_fatal); ++i) {
        sigaction(g_fatal[i], &action, &g_before.signals[i]);
    }
#endif
    // Without these two handlers, ggml would print a backtrace and C++ would print a message before the signal is
    // raised
    g_before.abort     = ggml_set_abort_callback(on_abort);
    g_before.terminate = std::set_terminate(on_terminate);
}

static void guard_off() {
    for (size_t i = 0; i < std::size(g_fatal); ++i) {
#if defined(_WIN32)
        signal(g_fatal[i], g_before.signals[i]);
#else
        sigaction(g_fatal[i], &g_before.signals[i], nullptr);
#endif
    }
    ggml_set_abort_callback(g_before.abort);
    std::set_terminate(g_before.terminate);
}

int32_t llama_kvtool_guard(const char * message, int32_t exit_code, bool verbose) {
    if (message && strlen(message) >= sizeof(g_message)) {
        return kvtool::fail(format("message must have at most %d bytes", (int) sizeof(g_message) - 1));
    }
    if (message) {
        memcpy(g_message, message, strlen(message) + 1);
        g_exit_code = exit_code;
        g_verbose   = verbose;
    }
    if ((message != nullptr) != g_guarding) {
        g_guarding = !g_guarding;
        g_guarding ? guard_on() : guard_off();
    }
    return 0;
}
