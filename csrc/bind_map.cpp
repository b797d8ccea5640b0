// Read-only maps of whole files that hold no descriptor.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "arrays.h"

namespace tdp {

namespace {

struct Mapping {
    void* address;
    size_t size;
    ~Mapping() { munmap(address, size); }
};

[[noreturn]] void raise_os_error(const std::string& path) {
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw py::error_already_set();
}

// A map outlives the descriptor it was made with. Python's mmap keeps a copy of it all the same, and thousands of
// index caches would need thousands of them.
py::array map_file(const std::string& path) {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) raise_os_error(path);
    struct stat status;
    void* address = MAP_FAILED;
    const bool known = fstat(descriptor, &status) == 0;
    const size_t size = known ? static_cast<size_t>(status.st_size) : 0;
    if (known && size > 0) address = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
    const int error = errno;
    close(descriptor);
    if (known && size == 0) return empty<uint8_t>({0});
    if (address == MAP_FAILED) {
        errno = error;
        raise_os_error(path);
    }
    auto mapping = std::unique_ptr<Mapping>(new Mapping{address, size});
    py::capsule owner(mapping.get(), [](void* held) { delete static_cast<Mapping*>(held); });
    mapping.release();
    py::array_t<uint8_t> array({static_cast<py::ssize_t>(size)}, {1}, static_cast<const uint8_t*>(address), owner);
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
}

}  // namespace

void register_map(py::module_& m) {
    m.def("map_file", &map_file, py::arg("path"), "A whole file as a read-only uint8 array; no descriptor stays open.");
}

}  // namespace tdp
