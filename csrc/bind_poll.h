// The Poll of a call from Python: signals such as Ctrl-C, and the caller's own reason to stop.
#pragma once

#include <pybind11/pybind11.h>

#include "poll.h"

namespace tdp {

// For loops that run without the GIL. `stop` is None or a callable that raises; Python tells signals to its main thread
// alone, so loops in other threads need one.
inline Poll poll_of(const pybind11::object& stop) {
    return [&stop] {
        pybind11::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
        if (!stop.is_none()) stop();
    };
}

}  // namespace tdp
