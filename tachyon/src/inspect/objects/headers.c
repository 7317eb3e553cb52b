/* Prints what `ObjectLayout` says of one CPython's headers, one `name value` a line. Compiled and run by the unit test
 * beside it, which compares; never shipped. */
#define Py_BUILD_CORE 1
#include <Python.h>
#if PY_VERSION_HEX >= 0x03090000
#include "internal/pycore_interp.h"
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
    FIELD(module_dict, PyModuleObject, md_dict);
    FIELD(dict_keys, PyDictObject, ma_keys);
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
    return 0;
}
