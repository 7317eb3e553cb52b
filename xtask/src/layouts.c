/* Prints what `tachyon_common::layout::Layout` wants to know of one CPython's headers: one `name value` a line,
 * `-` for what this version does not have. Compiled and run by `cargo xtask layouts`; never shipped. */
#define Py_BUILD_CORE 1
#include <Python.h>
#include <frameobject.h>
#if PY_VERSION_HEX >= 0x03090000
#include "internal/pycore_interp.h"
#include "internal/pycore_runtime.h"
#endif
#include "internal/pycore_pystate.h"
#if PY_VERSION_HEX >= 0x030B0000
#include "internal/pycore_frame.h"
#endif
#if PY_VERSION_HEX >= 0x030E0000
#include "internal/pycore_interpframe_structs.h"
#include "internal/pycore_stackref.h"
#endif
#include "internal/pycore_gil.h"
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define VALUE(name, value) printf("%s %zu\n", #name, (size_t)(value))
#define FIELD(name, type, member) VALUE(name, offsetof(type, member))
#define ABSENT(name) printf("%s -\n", #name)

/* The mask that a bit field occupies in the 32-bit word at the start of `variable`. */
#define MASK(result, type, variable, member, ones)                                                                     \
    do {                                                                                                               \
        type variable;                                                                                                 \
        memset(&variable, 0, sizeof variable);                                                                         \
        variable.member = ones;                                                                                        \
        memcpy(&result, &variable, sizeof result);                                                                     \
    } while (0)

int main(void) {
    printf("version %s\n", PY_VERSION);
    VALUE(version_hex, PY_VERSION_HEX);
#ifdef Py_GIL_DISABLED
    VALUE(free_threaded, 1);
#else
    VALUE(free_threaded, 0);
#endif
    VALUE(runtime_size, sizeof(_PyRuntimeState));
    VALUE(interp_size, sizeof(PyInterpreterState));
    VALUE(tstate_size, sizeof(PyThreadState));
#if PY_VERSION_HEX >= 0x030B0000
    VALUE(frame_size, sizeof(_PyInterpreterFrame));
#else
    VALUE(frame_size, sizeof(PyFrameObject));
#endif
    VALUE(code_size, sizeof(PyCodeObject));
    VALUE(type_size, sizeof(PyTypeObject));

    FIELD(runtime_interpreters_head, _PyRuntimeState, interpreters.head);
    // `Layout::MAIN_AFTER_HEAD`.
    _Static_assert(
        offsetof(_PyRuntimeState, interpreters.main) == offsetof(_PyRuntimeState, interpreters.head) + 8,
        "interpreters.main is elsewhere");
    FIELD(runtime_next_interp_id, _PyRuntimeState, interpreters.next_id);
#if PY_VERSION_HEX < 0x030F0000
    FIELD(runtime_main_thread, _PyRuntimeState, main_thread);
#else
    ABSENT(runtime_main_thread);
#endif
#if PY_VERSION_HEX < 0x030C0000
    FIELD(runtime_tstate_current, _PyRuntimeState, gilstate.tstate_current);
    FIELD(runtime_gil, _PyRuntimeState, ceval.gil);
#else
    ABSENT(runtime_tstate_current);
    ABSENT(runtime_gil);
#endif

#if PY_VERSION_HEX < 0x03090000
    FIELD(runtime_gc_collecting, _PyRuntimeState, gc.collecting);
#else
    ABSENT(runtime_gc_collecting);
#endif

    FIELD(interp_next, PyInterpreterState, next);
#if PY_VERSION_HEX >= 0x030B0000
    FIELD(interp_threads_head, PyInterpreterState, threads.head);
#else
    FIELD(interp_threads_head, PyInterpreterState, tstate_head);
#endif
    FIELD(interp_id, PyInterpreterState, id);
#if PY_VERSION_HEX >= 0x030C0000
    FIELD(interp_ceval_gil, PyInterpreterState, ceval.gil);
#else
    ABSENT(interp_ceval_gil);
#endif
#if PY_VERSION_HEX >= 0x030D0000
    FIELD(interp_threads_main, PyInterpreterState, threads.main);
#else
    ABSENT(interp_threads_main);
#endif
#if PY_VERSION_HEX >= 0x03090000
    FIELD(interp_gc_collecting, PyInterpreterState, gc.collecting);
#else
    ABSENT(interp_gc_collecting);
#endif
#if PY_VERSION_HEX >= 0x030F0000
    FIELD(interp_gc_frame, PyInterpreterState, gc.frame);
#else
    ABSENT(interp_gc_frame);
#endif
#if PY_VERSION_HEX >= 0x030E0000
    FIELD(interp_code_generation, PyInterpreterState, _code_object_generation);
#else
    ABSENT(interp_code_generation);
#endif

    FIELD(gil_locked, struct _gil_runtime_state, locked);
    FIELD(gil_last_holder, struct _gil_runtime_state, last_holder);

    FIELD(tstate_next, PyThreadState, next);
    FIELD(tstate_interp, PyThreadState, interp);
    FIELD(tstate_thread_id, PyThreadState, thread_id);
#if PY_VERSION_HEX >= 0x030B0000
    FIELD(tstate_native_thread_id, PyThreadState, native_thread_id);
#else
    ABSENT(tstate_native_thread_id);
#endif
#if PY_VERSION_HEX >= 0x030D0000
    FIELD(tstate_frame, PyThreadState, current_frame);
#elif PY_VERSION_HEX >= 0x030B0000
    FIELD(tstate_frame, PyThreadState, cframe);
#else
    FIELD(tstate_frame, PyThreadState, frame);
#endif
#if PY_VERSION_HEX >= 0x030A0000 && PY_VERSION_HEX < 0x030D0000
    FIELD(tstate_cframe, PyThreadState, cframe);
#else
    ABSENT(tstate_cframe);
#endif
#if PY_VERSION_HEX >= 0x030C0000
    {
        uint32_t mask;
        FIELD(tstate_status, PyThreadState, _status);
        MASK(mask, __typeof__(((PyThreadState *)0)->_status), status, bound_gilstate, 1);
        VALUE(status_bound_gilstate, mask);
        MASK(mask, __typeof__(((PyThreadState *)0)->_status), status, active, 1);
        VALUE(status_active, mask);
#if PY_VERSION_HEX >= 0x030D0000 && PY_VERSION_HEX < 0x030E0000
        MASK(mask, __typeof__(((PyThreadState *)0)->_status), status, holds_gil, 1);
        VALUE(status_holds_gil, mask);
#else
        VALUE(status_holds_gil, 0);
#endif
    }
#else
    ABSENT(tstate_status);
    VALUE(status_bound_gilstate, 0);
    VALUE(status_active, 0);
    VALUE(status_holds_gil, 0);
#endif
#if PY_VERSION_HEX >= 0x030E0000
    FIELD(tstate_holds_gil, PyThreadState, holds_gil);
#else
    ABSENT(tstate_holds_gil);
#endif
#if PY_VERSION_HEX >= 0x030F0000
    FIELD(tstate_gil_requested, PyThreadState, gil_requested);
    FIELD(tstate_base_frame, PyThreadState, base_frame);
#else
    ABSENT(tstate_gil_requested);
    ABSENT(tstate_base_frame);
#endif
#if PY_VERSION_HEX >= 0x030C0000
    FIELD(tstate_current_exception, PyThreadState, current_exception);
#else
    FIELD(tstate_current_exception, PyThreadState, curexc_type);
#endif
#if PY_VERSION_HEX >= 0x030E0000
    FIELD(tstate_current_executor, PyThreadState, current_executor);
#else
    ABSENT(tstate_current_executor);
#endif
    FIELD(tstate_exc_state, PyThreadState, exc_state);
    FIELD(exc_value, _PyErr_StackItem, exc_value);

#if PY_VERSION_HEX >= 0x030D0000
    ABSENT(cframe_current_frame);
#elif PY_VERSION_HEX >= 0x030B0000
    FIELD(cframe_current_frame, _PyCFrame, current_frame);
#else
    ABSENT(cframe_current_frame);
#endif
#if PY_VERSION_HEX >= 0x030B0000
    FIELD(frame_previous, _PyInterpreterFrame, previous);
#if PY_VERSION_HEX >= 0x030D0000
    FIELD(frame_code, _PyInterpreterFrame, f_executable);
    FIELD(frame_instr, _PyInterpreterFrame, instr_ptr);
#else
    FIELD(frame_code, _PyInterpreterFrame, f_code);
    FIELD(frame_instr, _PyInterpreterFrame, prev_instr);
#endif
    FIELD(frame_owner, _PyInterpreterFrame, owner);
    VALUE(owner_generator, FRAME_OWNED_BY_GENERATOR);
#else
    FIELD(frame_previous, PyFrameObject, f_back);
    FIELD(frame_code, PyFrameObject, f_code);
    FIELD(frame_instr, PyFrameObject, f_lasti);
    ABSENT(frame_owner);
    VALUE(owner_generator, 255);
#endif
#if PY_VERSION_HEX >= 0x030E0000
    VALUE(owner_shim_min, FRAME_OWNED_BY_INTERPRETER);
    VALUE(stackref_tag_mask, Py_TAG_BITS);
#elif PY_VERSION_HEX >= 0x030C0000
    VALUE(owner_shim_min, FRAME_OWNED_BY_CSTACK);
    VALUE(stackref_tag_mask, 0);
#else
    VALUE(owner_shim_min, 255);
    VALUE(stackref_tag_mask, 0);
#endif
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
    FIELD(frame_is_entry, _PyInterpreterFrame, is_entry);
#else
    ABSENT(frame_is_entry);
#endif
#if PY_VERSION_HEX >= 0x030E0000 && defined(Py_GIL_DISABLED)
    FIELD(frame_tlbc_index, _PyInterpreterFrame, tlbc_index);
    FIELD(code_tlbc, PyCodeObject, co_tlbc);
#else
    ABSENT(frame_tlbc_index);
    ABSENT(code_tlbc);
#endif

    FIELD(ob_type, PyObject, ob_type);
    FIELD(ob_size, PyVarObject, ob_size);
    FIELD(code_filename, PyCodeObject, co_filename);
#if PY_VERSION_HEX >= 0x030B0000
    FIELD(code_qualname, PyCodeObject, co_qualname);
    FIELD(code_code_adaptive, PyCodeObject, co_code_adaptive);
#else
    FIELD(code_qualname, PyCodeObject, co_name);
    ABSENT(code_code_adaptive);
#endif
    // How much to read of a structure follows from its fields: `Layout::complete` fills these.
    VALUE(tstate_read, 0);
    VALUE(frame_read, 0);
    VALUE(code_read, 0);
    VALUE(interp_read, 0);
    VALUE(interp_at, 0);
#if PY_VERSION_HEX >= 0x030A0000
    FIELD(code_linetable, PyCodeObject, co_linetable);
    VALUE(instr_unit, 2);
#else
    FIELD(code_linetable, PyCodeObject, co_lnotab);
    VALUE(instr_unit, 1);
#endif
    FIELD(code_firstlineno, PyCodeObject, co_firstlineno);
#if PY_VERSION_HEX >= 0x030C0000
    FIELD(code_version, PyCodeObject, co_version);
#else
    ABSENT(code_version);
#endif

    // What shows whether a new frame is linked to its caller, which these versions do a little later than they publish it.
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030D0000
    FIELD(frame_stacktop, _PyInterpreterFrame, stacktop);
    FIELD(frame_localsplus, _PyInterpreterFrame, localsplus);
    FIELD(code_nlocalsplus, PyCodeObject, co_nlocalsplus);
    FIELD(code_stacksize, PyCodeObject, co_stacksize);
    VALUE(generator_state_before, offsetof(PyGenObject, gi_iframe) - offsetof(PyGenObject, gi_frame_state));
#else
    ABSENT(frame_stacktop);
    ABSENT(frame_localsplus);
    ABSENT(code_nlocalsplus);
    ABSENT(code_stacksize);
    ABSENT(generator_state_before);
#endif
#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000
    FIELD(frame_return_offset, _PyInterpreterFrame, return_offset);
#else
    ABSENT(frame_return_offset);
#endif

    FIELD(bytes_sval, PyBytesObject, ob_sval);
    FIELD(unicode_state, PyASCIIObject, state);
    FIELD(unicode_length, PyASCIIObject, length);
    VALUE(unicode_ascii_size, sizeof(PyASCIIObject));
    VALUE(unicode_compact_size, sizeof(PyCompactUnicodeObject));
    {
        uint32_t mask;
        MASK(mask, __typeof__(((PyASCIIObject *)0)->state), state, kind, 7);
        VALUE(unicode_kind_shift, __builtin_ctz(mask));
        MASK(mask, __typeof__(((PyASCIIObject *)0)->state), state, compact, 1);
        VALUE(unicode_compact_bit, mask);
        MASK(mask, __typeof__(((PyASCIIObject *)0)->state), state, ascii, 1);
        VALUE(unicode_ascii_bit, mask);
    }
    return 0;
}
