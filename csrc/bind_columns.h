// A Column and the Python objects whose memory it points into.
#pragma once

#include <memory>
#include <vector>

#include "arrays.h"
#include "columns.h"
#include "dlpack_exchange.h"

namespace tdp {

class OwnedColumn {
public:
    // From contiguous arrays [S, ...] of one dtype and entry shape.
    explicit OwnedColumn(const py::list& arrays);

    // From one contiguous array [sum of lengths, ...] in which the samples follow each other.
    OwnedColumn(const py::array& joined, const Array<int64_t>& lengths);

    // From what dicts have under `key`: NumPy arrays or torch tensors on the CPU, one-dimensional, aligned, contiguous,
    // int64 or (floats) float32, and as long as those of `like`. Null if some is not.
    static std::unique_ptr<OwnedColumn> find(const py::list& items, const py::str& key, bool floats,
                                             const OwnedColumn* like);

    // The memory, after a look whether it is still there: a tensor may have been resized. Needs the GIL.
    const Column& view() const;

    // The same for native code that wants flat values of type T; throws py::type_error for others.
    template <typename T>
    const Column& view_as(const char* name) const {
        if (kind_ != py::dtype::of<T>().kind() || itemsize_ != sizeof(T) || column_.width != sizeof(T))
            throw py::type_error(std::string(name) + " is not a column of the right dtype");
        return view();
    }

    py::ssize_t size() const { return static_cast<py::ssize_t>(column_.data.size()); }
    const std::vector<int64_t>& lengths_of() const { return column_.length; }

private:
    OwnedColumn() = default;
    void add(py::object owner, const DlExchange* exchange, const void* data, int64_t length);
    bool add_value(PyObject* value, const OwnedColumn* like);
    bool locate(PyObject* value, const DlExchange* exchange, const void** data, int64_t* length) const;
    void set_dtype(const py::dtype& dtype, const py::array& first);

    Column column_;
    char kind_ = 0;
    int64_t itemsize_ = 0;
    std::vector<py::object> owners_;
    std::vector<const DlExchange*> exchanges_;  // per owner; null for an array
    PyTypeObject* last_type_ = nullptr;
    const DlExchange* last_exchange_ = nullptr;
};

}  // namespace tdp
