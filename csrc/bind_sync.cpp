// One wait for everything written to a file system.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "arrays.h"

namespace tdp {

namespace {

// After a crash, everything written to the file system of `path` before this call is there.
void sync_file_system(const std::string& path) {
    int failed = 0;
    {
        py::gil_scoped_release release;
#ifdef __linux__
        const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (descriptor < 0 || syncfs(descriptor) != 0) failed = errno;
        if (descriptor >= 0) close(descriptor);
#else
        (void)path;
        sync();
#endif
    }
    if (failed) {
        errno = failed;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw py::error_already_set();
    }
}

}  // namespace

void register_sync(py::module_& m) {
    m.def("sync_file_system", &sync_file_system, py::arg("path"),
          "Waits until all that was written to the file system of path is on its device.");
}

}  // namespace tdp
