// The extension module: one register_* function per topic, each in its bind_*.cpp.
#include <pybind11/pybind11.h>

namespace tdp {
void register_blend_changing(pybind11::module_& m);
void register_columns(pybind11::module_& m);
void register_gather(pybind11::module_& m);
void register_indices(pybind11::module_& m);
void register_pack(pybind11::module_& m);
void register_instant(pybind11::module_& m);
void register_map(pybind11::module_& m);
void register_random(pybind11::module_& m);
void register_reader(pybind11::module_& m);
void register_rows(pybind11::module_& m);
void register_sync(pybind11::module_& m);
void register_wire(pybind11::module_& m);
void register_schedule(pybind11::module_& m);
}  // namespace tdp

PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
    m.doc() = "Native kernels: index build, blend, gather. NumPy arrays in and out, no copies, GIL released.";
    tdp::register_indices(m);
    tdp::register_blend_changing(m);
    tdp::register_instant(m);
    tdp::register_map(m);
    tdp::register_random(m);
    tdp::register_reader(m);
    tdp::register_rows(m);
    tdp::register_sync(m);
    tdp::register_gather(m);
    tdp::register_pack(m);
    tdp::register_columns(m);
    tdp::register_wire(m);
    tdp::register_schedule(m);
}
