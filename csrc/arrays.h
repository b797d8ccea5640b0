// NumPy arrays at the binding: strict dtype and contiguity, never a silent copy.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

namespace tdp {

namespace py = pybind11;

// With py::arg().noconvert() a wrong dtype or a strided array is a TypeError.
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
int64_t size_1d(const Array<T>& array, const char* name) {
    if (array.ndim() != 1)
        throw std::invalid_argument(std::string(name) + " must have one dimension, has " +
                                    std::to_string(array.ndim()));
    return array.shape(0);
}

template <typename T>
void require_size(const Array<T>& array, const char* name, int64_t expected) {
    if (size_1d(array, name) != expected)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.shape(0)) +
                                    " elements, expected " + std::to_string(expected));
}

// A new array of uninitialised elements.
template <typename T>
Array<T> empty(std::initializer_list<py::ssize_t> shape) {
    return Array<T>(std::vector<py::ssize_t>(shape));
}

template <typename T>
Array<T> to_array(const std::vector<T>& values) {
    return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace tdp
