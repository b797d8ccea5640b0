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

py::array map_pages(int descriptor, size_t size, const std::string& name) {
    if (size == 0) return empty<uint8_t>({0});
    void* const address = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) raise_os_error(name);
    auto mapping = std::unique_ptr<Mapping>(new Mapping{address, size});
    py::capsule owner(mapping.get(), [](void* held) { delete static_cast<Mapping*>(held); });
    mapping.release();
    py::array_t<uint8_t> array({static_cast<py::ssize_t>(size)}, {1}, static_cast<const uint8_t*>(address), owner);
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
}

struct Descriptor {
    int number;
    ~Descriptor() {
        const int kept = errno;
        if (number >= 0) close(number);
        errno = kept;
    }
};

// A map outlives the descriptor it was made with. Python's mmap keeps a copy of it all the same, and thousands of
// files would need thousands of them.
py::array map_descriptor(int descriptor) {
    struct stat status;
    const std::string name = "descriptor " + std::to_string(descriptor);
    if (fstat(descriptor, &status) != 0) raise_os_error(name);
    return map_pages(descriptor, static_cast<size_t>(status.st_size), name);
}

py::array map_file(const std::string& path) {
    const Descriptor descriptor{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
    struct stat status;
    if (descriptor.number < 0 || fstat(descriptor.number, &status) != 0) raise_os_error(path);
    return map_pages(descriptor.number, static_cast<size_t>(status.st_size), path);
}

}  // namespace

void register_map(py::module_& m) {
    m.def("map_descriptor", &map_descriptor, py::arg("descriptor"),
          "The whole file that a descriptor has open, as map_file gives it; the descriptor may be closed.");
    m.def("map_file", &map_file, py::arg("path"), "A whole file as a read-only uint8 array; no descriptor stays open.");
}

}  // namespace tdp
