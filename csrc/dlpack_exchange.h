// Where a tensor's memory lies, without a torch header: torch's types carry a table of C functions for that, whose
// layout is fixed by DLPack's exchange API (dmlc/dlpack, version 1). A tensor seen so costs a tenth of one seen through
// NumPy.
#pragma once

#include <Python.h>

#include <cstdint>

namespace tdp {

struct DlDevice {
    int32_t type;  // 1 is the CPU
    int32_t id;
};

struct DlDtype {
    uint8_t code;  // 0 signed integer, 2 IEEE float
    uint8_t bits;
    uint16_t lanes;
};

struct DlTensor {
    void* data;
    DlDevice device;
    int32_t ndim;
    DlDtype dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; null where the tensor is contiguous
    uint64_t byte_offset;
};

struct DlExchange {
    struct {
        uint32_t major, minor;
    } version;
    DlExchange* previous;  // the table of an older version, or null
    void* allocate;
    void* managed_from_object;
    void* object_from_managed;
    int (*tensor_from_object)(void* object, DlTensor* out);  // borrows; 0, or -1 with a Python error
    void* current_stream;
};

// The table of a type that has one itself (a subclass may keep its data elsewhere), or null. Needs the GIL.
inline const DlExchange* dl_exchange_of(PyTypeObject* type) {
    if (type->tp_dict == nullptr) return nullptr;
    PyObject* capsule = PyDict_GetItemString(type->tp_dict, "__dlpack_c_exchange_api__");
    if (capsule == nullptr || !PyCapsule_IsValid(capsule, "dlpack_exchange_api")) return nullptr;
    auto* table = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (table != nullptr && table->version.major != 1) table = table->previous;
    return table;
}

}  // namespace tdp
