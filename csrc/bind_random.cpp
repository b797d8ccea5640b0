// Bindings of mt19937.h and shuffle.h.
#include <mutex>

#include "arrays.h"
#include "bind_poll.h"
#include "mt19937.h"
#include "shuffle.h"

namespace tdp {

namespace {

class LegacyRandom {
public:
    explicit LegacyRandom(Mt19937 generator) : generator_(generator) {}

    template <typename T>
    void shuffle(Array<T>& values, const py::object& stop) {
        const int64_t n = size_1d(values, "values");
        T* data = values.mutable_data();
        const Poll poll = poll_of(stop);
        py::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(mutex_);
        legacy_shuffle(generator_, data, n, poll);
    }

private:
    Mt19937 generator_;
    std::mutex mutex_;
};

std::unique_ptr<LegacyRandom> from_seed(int64_t seed) {
    if (seed < 0 || seed > static_cast<int64_t>(UINT32_MAX))
        throw std::invalid_argument("seed must be in [0, 2**32), got " + std::to_string(seed));
    return std::make_unique<LegacyRandom>(Mt19937(static_cast<uint32_t>(seed)));
}

std::unique_ptr<LegacyRandom> from_key(const Array<uint32_t>& key) {
    return std::make_unique<LegacyRandom>(Mt19937(key.data(), size_1d(key, "key")));
}

}  // namespace

void register_random(py::module_& m) {
    py::class_<LegacyRandom>(m, "LegacyRandom",
                             "numpy.random.RandomState's generator with its shuffle, draw for draw, many times faster.")
        .def(py::init(&from_key), py::arg("key").noconvert())
        .def(py::init(&from_seed), py::arg("seed"))
        .def("shuffle", &LegacyRandom::shuffle<int32_t>, py::arg("values").noconvert(), py::arg("stop") = py::none())
        .def("shuffle", &LegacyRandom::shuffle<uint32_t>, py::arg("values").noconvert(), py::arg("stop") = py::none())
        .def("shuffle", &LegacyRandom::shuffle<int64_t>, py::arg("values").noconvert(), py::arg("stop") = py::none(),
             "Shuffles an int32, uint32 or int64 array in place, as RandomState.shuffle would.");
}

}  // namespace tdp
