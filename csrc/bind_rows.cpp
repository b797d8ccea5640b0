// Batches of fixed-length samples: rows read into memory that is used again.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>

#include "bind_reader.h"

namespace tdp {

namespace {

using Int64s = Array<int64_t>;

template <typename T>
void require_shape(const Array<T>& array, const char* name, int64_t rows, int64_t width) {
    if (array.ndim() != 2 || array.shape(0) != rows || array.shape(1) != width)
        throw std::invalid_argument(std::string(name) + " must have shape [" + std::to_string(rows) + ", " +
                                    std::to_string(width) + "]");
}

using Int32s = Array<int32_t>;

// The outputs of a batch: four, and two more where documents are kept apart.
struct RowOutputs {
    TokenOutputs out;
    int64_t rows, width;
    int32_t* cu_seqlens = nullptr;
    int32_t* max_seqlen = nullptr;

    RowOutputs(Int64s& tokens, Int64s& labels, Array<float>& loss_mask, Int64s& position_ids,
               std::optional<Int32s>& cu_seqlens_out, std::optional<Int32s>& max_seqlen_out) {
        if (tokens.ndim() != 2) throw std::invalid_argument("tokens must have two dimensions");
        rows = tokens.shape(0);
        width = tokens.shape(1);
        if (width > INT32_MAX)
            throw std::invalid_argument("rows of " + std::to_string(width) + " tokens are longer than int32 counts");
        require_shape(labels, "labels", rows, width);
        require_shape(loss_mask, "loss_mask", rows, width);
        require_shape(position_ids, "position_ids", rows, width);
        out = {tokens.mutable_data(), labels.mutable_data(), loss_mask.mutable_data(), position_ids.mutable_data(),
               rows * width};
        if (cu_seqlens_out.has_value() != max_seqlen_out.has_value())
            throw std::invalid_argument("cu_seqlens and max_seqlen go together");
        if (!cu_seqlens_out) return;
        require_shape(*cu_seqlens_out, "cu_seqlens", rows, width + 1);
        require_size(*max_seqlen_out, "max_seqlen", rows);
        cu_seqlens = cu_seqlens_out->mutable_data();
        max_seqlen = max_seqlen_out->mutable_data();
    }

    void fill_documents_of(int64_t row, const TokenSource& source, int64_t sample) const {
        max_seqlen[row] = fill_documents(source.document_lengths(sample), width, out.position_ids + row * width,
                                         cu_seqlens + row * (width + 1));
    }
};

Requests row_requests(const RowOutputs& rows, std::size_t num_readers, const int64_t* reader_of,
                      const int64_t* numbers) {
    Requests requests(reader_of, num_readers, rows.rows);
    for (int64_t i = 0; i < rows.rows; ++i) requests.set(i, numbers[i], 0, rows.width, i * rows.width);
    return requests;
}

// The beginnings of samples [first, first + rows) of a list, one a row. Those from `next` on will be read after them,
// where the list goes on that far.
void read_into(const RowOutputs& rows, const Readers& readers, const std::optional<Int64s>& reader_index,
               const Int64s& sample, int64_t first, int64_t next) {
    require_mapped(readers);
    const int64_t n = size_1d(sample, "sample");
    if (first < 0 || first > n - rows.rows)
        throw std::invalid_argument(std::to_string(rows.rows) + " rows from sample " + std::to_string(first) +
                                    " on, there are " + std::to_string(n));
    if (reader_index) require_size(*reader_index, "reader_index", rows.rows);
    const int64_t* reader_of = reader_index ? reader_index->data() : nullptr;
    const int64_t* numbers = sample.data() + first;
    const Requests requests = row_requests(rows, readers.size(), reader_of, numbers);
    prepare(readers, requests);
    // Of several readers only those of the rows to read now are known.
    Later later;
    std::optional<Requests> later_requests;
    if (!reader_of && next >= 0 && next <= n - rows.rows) {
        later.sample = sample.data() + next;
        later.num_samples = rows.rows;
        if (should_read_ahead()) {
            later_requests = row_requests(rows, readers.size(), reader_of, later.sample);
            prepare(readers, *later_requests);
            later.requests = &*later_requests;
        }
    }
    py::gil_scoped_release release;
    read(readers, requests, rows.out, later);
    if (!rows.cu_seqlens) return;
    for (int64_t i = 0; i < rows.rows; ++i)
        rows.fill_documents_of(i, *readers[reader_of ? reader_of[i] : 0]->source, numbers[i]);
}

void read_rows(const Readers& readers, const std::optional<Int64s>& reader_index, const Int64s& sample,
               int64_t first, Int64s& tokens, Int64s& labels, Array<float>& loss_mask, Int64s& position_ids,
               std::optional<Int32s> cu_seqlens, std::optional<Int32s> max_seqlen) {
    const RowOutputs rows(tokens, labels, loss_mask, position_ids, cu_seqlens, max_seqlen);
    read_into(rows, readers, reader_index, sample, first, -1);
}

// Ends and positions of the documents of one row, whatever file its sample lies in.
int32_t read_documents(SpanReader& reader, int64_t sample, Int64s& position_ids, Int32s& cu_seqlens) {
    const int64_t width = size_1d(position_ids, "position_ids");
    require_size(cu_seqlens, "cu_seqlens", width + 1);
    reader.source->prepare(&sample, 1);
    return fill_documents(reader.source->document_lengths(sample), width, position_ids.mutable_data(),
                          cu_seqlens.mutable_data());
}

// Sets of outputs for one batch after the other. A set is free when only this object refers to its arrays: whoever
// has made a tensor of an array keeps the array alive with it, and so does every view of the tensor.
class RowBuffers {
public:
    RowBuffers(std::vector<py::str> names, py::function to_tensor)
        : names_(std::move(names)), to_tensor_(std::move(to_tensor)) {}

    void add(Int64s tokens, Int64s labels, Array<float> loss_mask, Int64s position_ids,
             std::optional<Int32s> cu_seqlens, std::optional<Int32s> max_seqlen) {
        const RowOutputs rows(tokens, labels, loss_mask, position_ids, cu_seqlens, max_seqlen);
        std::vector<py::object> arrays{tokens, labels, loss_mask, position_ids};
        if (cu_seqlens) arrays.insert(arrays.end(), {*cu_seqlens, *max_seqlen});
        if (arrays.size() != names_.size())
            throw std::invalid_argument(std::to_string(arrays.size()) + " outputs for " +
                                        std::to_string(names_.size()) + " names");
        sets_.push_back({std::move(arrays), rows});
    }

    std::size_t size() const { return sets_.size(); }

    // The tensors by name, or None where no set is free.
    py::object read(const Readers& readers, const std::optional<Int64s>& reader_index, const Int64s& sample,
                    int64_t first, int64_t next) {
        for (const Set& set : sets_) {
            if (!set.is_free()) continue;
            // Held while the GIL is released, so that nobody else takes it.
            const auto [arrays, rows] = set;
            read_into(rows, readers, reader_index, sample, first, next);
            py::dict batch;
            for (std::size_t i = 0; i < arrays.size(); ++i) {
                PyObject* tensor = PyObject_CallOneArg(to_tensor_.ptr(), arrays[i].ptr());
                if (!tensor) throw py::error_already_set();
                batch[names_[i]] = py::reinterpret_steal<py::object>(tensor);
            }
            return std::move(batch);
        }
        return py::none();
    }

private:
    struct Set {
        std::vector<py::object> arrays;
        RowOutputs rows;

        bool is_free() const {
            for (const py::object& array : arrays)
                if (array.ref_count() != 1) return false;
            return true;
        }
    };

    std::vector<py::str> names_;
    py::function to_tensor_;
    std::vector<Set> sets_;
};

#define TDP_ARG(name) py::arg(#name).noconvert()
#define TDP_OUTPUTS                                                                    \
    TDP_ARG(tokens), TDP_ARG(labels), TDP_ARG(loss_mask), TDP_ARG(position_ids),       \
        TDP_ARG(cu_seqlens) = py::none(), TDP_ARG(max_seqlen) = py::none()

}  // namespace

void register_rows(py::module_& m) {
    m.def("read_rows", &read_rows, py::arg("readers"), TDP_ARG(reader_index), TDP_ARG(sample), py::arg("first"),
          TDP_OUTPUTS, "The beginnings of samples [first, first + n) of a list, one a row of the outputs [n, S]; with cu_seqlens "
          "[n, S + 1] and max_seqlen [n] positions restart at documents.");
    m.def("read_documents", &read_documents, py::arg("reader"), py::arg("sample"), TDP_ARG(position_ids),
          TDP_ARG(cu_seqlens), "Documents of a sample in a row [S]; returns the longest one's tokens.");
    py::class_<RowBuffers>(m, "RowBuffers", "Outputs [n, S] for one batch after the other; see csrc/bind_rows.cpp.")
        .def(py::init<std::vector<py::str>, py::function>(), py::arg("names"), py::arg("to_tensor"))
        .def("__len__", &RowBuffers::size)
        .def("add", &RowBuffers::add, TDP_OUTPUTS, "One more set of outputs.")
        .def("read", &RowBuffers::read, py::arg("readers"), TDP_ARG(reader_index), TDP_ARG(sample), py::arg("first"),
             py::arg("next"),
             "read_rows into a set that nobody uses, as tensors by name; None where there is none. The samples from "
             "`next` on will be read after them.");
}

}  // namespace tdp
