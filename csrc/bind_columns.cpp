// Bindings of columns.h.
#include "bind_columns.h"

#include <pybind11/stl.h>

#include <optional>

namespace tdp {

namespace {

constexpr int32_t kCpu = 1, kPinnedCpu = 3;

bool aligned(const void* data, int64_t itemsize) { return reinterpret_cast<uintptr_t>(data) % itemsize == 0; }

}  // namespace

void OwnedColumn::set_dtype(const py::dtype& dtype, const py::array& first) {
    if (dtype.attr("hasobject").cast<bool>()) throw py::type_error("a column cannot hold Python objects");
    kind_ = dtype.kind();
    itemsize_ = dtype.itemsize();
    column_.width = itemsize_;
    for (py::ssize_t d = 1; d < first.ndim(); ++d) column_.width *= first.shape(d);
}

void OwnedColumn::add(py::object owner, const DlExchange* exchange, const void* data, int64_t length) {
    column_.data.push_back(static_cast<const unsigned char*>(data));
    column_.length.push_back(length);
    owners_.push_back(std::move(owner));
    exchanges_.push_back(exchange);
}

OwnedColumn::OwnedColumn(const py::list& arrays) {
    py::dtype dtype;
    for (const py::handle item : arrays) {
        if (!py::isinstance<py::array>(item)) throw py::type_error("a column is made of arrays");
        const auto array = py::reinterpret_borrow<py::array>(item);
        if (array.ndim() < 1) throw std::invalid_argument("an array of a column needs a dimension of tokens");
        if (owners_.empty()) {
            dtype = array.dtype();
            set_dtype(dtype, array);
        }
        int64_t width = array.itemsize();
        for (py::ssize_t d = 1; d < array.ndim(); ++d) width *= array.shape(d);
        if (!array.dtype().equal(dtype) || width != column_.width || !(array.flags() & py::array::c_style))
            throw py::type_error("array " + std::to_string(owners_.size()) +
                                 " of a column is not contiguous, or not like the first");
        if (!aligned(array.data(), itemsize_)) throw std::invalid_argument("an array of a column is not aligned");
        add(py::reinterpret_borrow<py::object>(item), nullptr, array.data(), array.shape(0));
    }
}

OwnedColumn::OwnedColumn(const py::array& joined, const Array<int64_t>& lengths) {
    const int64_t n = size_1d(lengths, "lengths");
    if (joined.ndim() < 1 || !(joined.flags() & py::array::c_style) || !aligned(joined.data(), joined.itemsize()))
        throw py::type_error("the joined array of a column must be contiguous and aligned");
    set_dtype(joined.dtype(), joined);
    const auto* data = static_cast<const unsigned char*>(joined.data());
    int64_t at = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t length = lengths.data()[i];
        if (length < 0 || length > joined.shape(0) - at)
            throw std::out_of_range("the lengths of a column leave its array of " + std::to_string(joined.shape(0)));
        column_.data.push_back(data + at * column_.width);
        column_.length.push_back(length);
        at += length;
    }
    owners_.push_back(joined);
    exchanges_.push_back(nullptr);
}

bool OwnedColumn::locate(PyObject* value, const DlExchange* exchange, const void** data, int64_t* length) const {
    DlTensor tensor;
    if (exchange->tensor_from_object(value, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    if ((tensor.device.type != kCpu && tensor.device.type != kPinnedCpu) || tensor.ndim != 1 ||
        tensor.dtype.lanes != 1 || tensor.dtype.code != (kind_ == 'f' ? 2 : 0) || tensor.dtype.bits != 8 * itemsize_)
        return false;
    if (tensor.shape[0] > 1 && tensor.strides != nullptr && tensor.strides[0] != 1) return false;
    *data = static_cast<const unsigned char*>(tensor.data) + tensor.byte_offset;
    *length = tensor.shape[0];
    return aligned(*data, itemsize_);
}

bool OwnedColumn::add_value(PyObject* value, const OwnedColumn* like) {
    const void* data = nullptr;
    int64_t length = 0;
    const DlExchange* exchange = nullptr;
    if (py::isinstance<py::array>(value)) {
        const auto array = py::reinterpret_borrow<py::array>(value);
        const bool fits = kind_ == 'f' ? py::isinstance<Array<float>>(value) : py::isinstance<Array<int64_t>>(value);
        if (!fits || array.ndim() != 1) return false;
        data = array.data();
        length = array.shape(0);
        if (!aligned(data, itemsize_)) return false;
    } else {
        if (Py_TYPE(value) != last_type_) {
            last_type_ = Py_TYPE(value);
            last_exchange_ = dl_exchange_of(last_type_);
        }
        exchange = last_exchange_;
        if (exchange == nullptr || exchange->tensor_from_object == nullptr) return false;
        if (!locate(value, exchange, &data, &length)) return false;
        // A float tensor can be the negative of its memory; DLPack does not say so.
        if (kind_ == 'f' && py::handle(value).attr("is_neg")().cast<bool>()) return false;
    }
    if (like != nullptr && length != like->column_.length[column_.length.size()]) return false;
    add(py::reinterpret_borrow<py::object>(value), exchange, data, length);
    return true;
}

std::unique_ptr<OwnedColumn> OwnedColumn::find(const py::list& items, const py::str& key, bool floats,
                                               const OwnedColumn* like) {
    if (like != nullptr && like->size() != static_cast<py::ssize_t>(items.size())) return nullptr;
    std::unique_ptr<OwnedColumn> found(new OwnedColumn());
    found->kind_ = floats ? 'f' : 'i';
    found->itemsize_ = found->column_.width = floats ? 4 : 8;
    const size_t n = items.size();
    found->column_.data.reserve(n);
    found->column_.length.reserve(n);
    found->owners_.reserve(n);
    found->exchanges_.reserve(n);
    for (const py::handle item : items) {
        // Only plain dicts: what other mappings do when they are asked takes longer than all of this.
        if (!PyDict_CheckExact(item.ptr())) return nullptr;
        PyObject* value = PyDict_GetItemWithError(item.ptr(), key.ptr());
        if (value == nullptr) {
            if (PyErr_Occurred()) throw py::error_already_set();
            return nullptr;
        }
        if (!found->add_value(value, like)) return nullptr;
    }
    return found;
}

const Column& OwnedColumn::view() const {
    for (size_t i = 0; i < owners_.size(); ++i) {
        if (exchanges_[i] == nullptr) continue;  // arrays keep their memory while they are referred to
        const void* data = nullptr;
        int64_t length = 0;
        if (!locate(owners_[i].ptr(), exchanges_[i], &data, &length) || data != column_.data[i] ||
            length != column_.length[i])
            throw std::runtime_error("the tensor of sample " + std::to_string(i) +
                                     " was resized or replaced while it waited to be packed; yield a new one instead");
    }
    return column_;
}

namespace {

ColumnSpans spans_of(const Array<int64_t>& samples, const Array<int64_t>& starts, const Array<int64_t>& lengths,
                     const Array<int64_t>& targets) {
    const int64_t n = size_1d(samples, "samples");
    require_size(starts, "starts", n);
    require_size(lengths, "lengths", n);
    require_size(targets, "targets", n);
    return {samples.data(), starts.data(), lengths.data(), targets.data(), n};
}

void copy_spans(const OwnedColumn& self, const Array<int64_t>& samples, const Array<int64_t>& starts,
                const Array<int64_t>& lengths, Array<uint8_t>& target, const Array<int64_t>& targets) {
    const ColumnSpans spans = spans_of(samples, starts, lengths, targets);
    const int64_t bytes = size_1d(target, "target");
    uint8_t* out = target.mutable_data();
    const Column& column = self.view();
    py::gil_scoped_release release;
    copy_column_spans(column, spans, out, bytes);
}

void narrow_spans(const OwnedColumn& self, int dtype_code, const Array<int64_t>& samples, const Array<int64_t>& starts,
                  const Array<int64_t>& lengths, const Array<int64_t>& follows, const Array<int64_t>& last_labels,
                  Array<uint8_t>& target, const Array<int64_t>& targets) {
    const ColumnSpans spans = spans_of(samples, starts, lengths, targets);
    require_size(follows, "follows", spans.n);
    require_size(last_labels, "last_labels", self.size());
    const int64_t bytes = size_1d(target, "target");
    uint8_t* out = target.mutable_data();
    const int64_t *follow = follows.data(), *last = last_labels.data();
    const Column& column = self.view_as<int64_t>("tokens");
    py::gil_scoped_release release;
    narrow_column_spans(column, spans, follow, last, dtype_code, out, bytes);
}

}  // namespace

#define TDP_ARG(name) py::arg(#name).noconvert()

void register_columns(py::module_& m) {
    py::class_<OwnedColumn>(m, "Column", "The arrays that many samples have under one key; see csrc/columns.h.")
        .def(py::init<const py::list&>(), py::arg("arrays"))
        .def(py::init<const py::array&, const Array<int64_t>&>(), TDP_ARG(joined), TDP_ARG(lengths))
        .def_static("find", &OwnedColumn::find, TDP_ARG(items), TDP_ARG(key), py::arg("floats"),
                    py::arg("like") = nullptr,
                    "From the flat int64 (or float32) arrays or tensors under a key of dicts, of the lengths of "
                    "`like`; None if some is of another kind.")
        .def("__len__", &OwnedColumn::size)
        .def_property_readonly(
            "lengths", [](const OwnedColumn& self) { return to_array(self.lengths_of()); }, "int64 [n], tokens of each sample.")
        .def("copy_spans", &copy_spans, TDP_ARG(samples), TDP_ARG(starts), TDP_ARG(lengths), TDP_ARG(target),
             TDP_ARG(targets), "Copies spans of samples to byte offsets of a buffer.")
        .def("narrow_spans", &narrow_spans, py::arg("dtype_code"), TDP_ARG(samples), TDP_ARG(starts), TDP_ARG(lengths),
             TDP_ARG(follows), TDP_ARG(last_labels), TDP_ARG(target), TDP_ARG(targets),
             "The same for int64 tokens in a narrower type, each span with the token that follows it where wanted.");
}

}  // namespace tdp
