/* Prints what `ObjectLayout` and `AwaitLayout` say of one CPython's headers, one `name value` a line. Compiled and run by the unit test
 * beside it, which compares; never shipped. */
#define Py_BUILD_CORE 1
#include <Python.h>
#if PY_VERSION_HEX >= 0x03090000
#include "internal/pycore_interp.h"
#include "internal/pycore_gc.h"
#else
#include "internal/pycore_pystate.h"
#endif
#if PY_VERSION_HEX >= 0x030A0000
#include "internal/pycore_moduleobject.h"
#else
/* Objects/moduleobject.c (v3.8.18, v3.9.18) */
typedef struct {
    PyObject_HEAD
    PyObject *md_dict;
} PyModuleObject;
#endif
#if PY_VERSION_HEX >= 0x030B0000
#include "internal/pycore_dict.h"
#include "internal/pycore_object.h"
#else
/* Objects/dict-common.h (v3.8.18, v3.9.18, v3.10.13) */
struct _dictkeysobject {
    Py_ssize_t dk_refcnt;
    Py_ssize_t dk_size;
    void *dk_lookup;
    Py_ssize_t dk_usable;
    Py_ssize_t dk_nentries;
    char dk_indices[];
};
#endif
#if PY_VERSION_HEX >= 0x030B0000
#include "internal/pycore_frame.h"
#else
#include <frameobject.h>
#endif
#include <stddef.h>
#include <stdio.h>

#define VALUE(name, value) printf("%s %ld\n", #name, (long)(value))
#define FIELD(name, type, member) VALUE(name, offsetof(type, member))
#define ABSENT(name) printf("%s -\n", #name)

int main(void) {
    printf("version %d.%d\n", PY_MAJOR_VERSION, PY_MINOR_VERSION);
#if PY_VERSION_HEX >= 0x030C0000
    FIELD(interp_modules, PyInterpreterState, imports.modules);
#else
    FIELD(interp_modules, PyInterpreterState, modules);
#endif
    FIELD(tstate_dict, PyThreadState, dict);
#if PY_VERSION_HEX >= 0x030D0000
    FIELD(tstate_running_loop, _PyThreadStateImpl, asyncio_running_loop);
#else
    ABSENT(tstate_running_loop);
#endif
    VALUE(collector_size, sizeof(struct _gc_runtime_state));
#if PY_VERSION_HEX >= 0x03090000
    VALUE(collector_of_runtime, 0);
    FIELD(collector_state, PyInterpreterState, gc);
#else
    VALUE(collector_of_runtime, 1);
    FIELD(collector_state, _PyRuntimeState, gc);
#endif
    FIELD(module_dict, PyModuleObject, md_dict);
    FIELD(dict_keys, PyDictObject, ma_keys);
    FIELD(dict_used, PyDictObject, ma_used);
    FIELD(dict_values, PyDictObject, ma_values);
#if PY_VERSION_HEX >= 0x030B0000
    FIELD(keys_size, struct _dictkeysobject, dk_log2_size);
    FIELD(keys_kind, struct _dictkeysobject, dk_kind);
    FIELD(values_start, struct _dictvalues, values);
#else
    FIELD(keys_size, struct _dictkeysobject, dk_size);
    ABSENT(keys_kind);
    VALUE(values_start, 0);
#endif
    FIELD(keys_nentries, struct _dictkeysobject, dk_nentries);
    FIELD(keys_indices, struct _dictkeysobject, dk_indices);
#if PY_VERSION_HEX >= 0x030C0000
    FIELD(long_tag, PyLongObject, long_value.lv_tag);
    FIELD(long_digit, PyLongObject, long_value.ob_digit);
#else
    FIELD(long_tag, PyVarObject, ob_size);
    FIELD(long_digit, struct _longobject, ob_digit);
#endif
    FIELD(type_basicsize, PyTypeObject, tp_basicsize);
    FIELD(type_dictoffset, PyTypeObject, tp_dictoffset);
    FIELD(type_flags, PyTypeObject, tp_flags);
#if PY_VERSION_HEX >= 0x030B0000
    FIELD(heap_type_cached_keys, PyHeapTypeObject, ht_cached_keys);
#ifdef MANAGED_DICT_OFFSET
    VALUE(managed_dict, MANAGED_DICT_OFFSET);
#else
    /* 3.12: _PyObject_DictOrValuesPointer() */
    VALUE(managed_dict, -3 * (long)sizeof(PyObject *));
#endif
#else
    ABSENT(heap_type_cached_keys);
    ABSENT(managed_dict);
#endif
#if PY_VERSION_HEX >= 0x030B0000
    FIELD(gen_iframe, PyGenObject, gi_iframe);
    FIELD(gen_frame_state, PyGenObject, gi_frame_state);
#else
    FIELD(gen_frame, PyGenObject, gi_frame);
    FIELD(code_code, PyCodeObject, co_code);
#endif
/* 3.14 has a pointer instead, and publishes where it is. */
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000
    FIELD(frame_stacktop, _PyInterpreterFrame, stacktop);
    FIELD(frame_localsplus, _PyInterpreterFrame, localsplus);
#elif PY_VERSION_HEX >= 0x030A0000 && PY_VERSION_HEX < 0x030B0000
    FIELD(frame_stackdepth, PyFrameObject, f_stackdepth);
    FIELD(frame_valuestack, PyFrameObject, f_valuestack);
    FIELD(frame_state, PyFrameObject, f_state);
#elif PY_VERSION_HEX < 0x030A0000
    FIELD(frame_stacktop, PyFrameObject, f_stacktop);
    FIELD(frame_executing, PyFrameObject, f_executing);
#endif
    FIELD(set_mask, PySetObject, mask);
    FIELD(set_table, PySetObject, table);
    FIELD(type_name, PyTypeObject, tp_name);
    FIELD(type_base, PyTypeObject, tp_base);
    FIELD(function_qualname, PyFunctionObject, func_qualname);
    FIELD(function_closure, PyFunctionObject, func_closure);
    FIELD(var_size, PyVarObject, ob_size);
    FIELD(tuple_items, PyTupleObject, ob_item);
    FIELD(list_items, PyListObject, ob_item);
    FIELD(cell_ref, PyCellObject, ob_ref);
    FIELD(method_self, PyMethodObject, im_self);
    FIELD(weakref_object, PyWeakReference, wr_object);
    return 0;
}
