//! Where CPython 3.8 to 3.13 keep asyncio's tasks: they publish nothing, but the module `asyncio.tasks` has all of them in sets.
//!
//! `TaskObj` is in no header. Its rows are from `Modules/_asynciomodule.c`; the size of the type in the process must be the row's,
//! so that another patch release is never mistaken for it, and live tests compare each version's row with its own objects.

use super::awaits::{AwaitLayout, CoroutineLayout};
use super::objects::ObjectLayout;
use tachyon_common::layout::{Layout, flags};
use tachyon_common::whose::Asyncio;

/// Where fields are, in bytes from the start of the structure named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModuleTasks {
    /// `sizeof(TaskObj)`: `_asyncio.Task.__basicsize__`.
    pub task_size: u64,
    /// `TaskObj.task_state`, a 32-bit word, 0 while the task is pending.
    pub state: u64,
    /// `TaskObj.task_fut_waiter`: the future or task that it awaits.
    pub fut_waiter: u64,
    /// `TaskObj.task_coro`.
    pub coro: u64,
    /// `TaskObj.task_name`.
    pub name: u64,
    /// `FutureObj.fut_callback0`.
    pub callback0: u64,
    /// `FutureObj.fut_callbacks`: a list of pairs of callback and context.
    pub callbacks: u64,
    /// `PyWeakReference.wr_object`.
    pub weakref_object: u64,
    /// `PyTypeObject.tp_base`.
    pub type_base: u64,
    /// `PyFunctionObject.func_qualname`.
    pub function_qualname: u64,
    /// `PyFunctionObject.func_closure`: a tuple of cells.
    pub function_closure: u64,
    /// `PyMethodObject.im_self`.
    pub method_self: u64,
    /// `partialobject.fn` (`Modules/_functoolsmodule.c`).
    pub partial_function: u64,
    /// `partialobject.args`: a tuple.
    pub partial_args: u64,
    /// `PyCellObject.ob_ref`.
    pub cell_ref: u64,
    /// `PyVarObject.ob_size`.
    pub var_size: u64,
    /// `PyTupleObject.ob_item`: the items.
    pub tuple_items: u64,
    /// `PyListObject.ob_item`: a pointer to the items.
    pub list_items: u64,
    /// Where fields of Python's own objects are.
    pub objects: &'static ObjectLayout,
}

impl ModuleTasks {
    /// The row for an interpreter; `None` for 3.14 and newer.
    #[must_use]
    pub fn of(layout: &Layout) -> Option<Self> {
        Self::row(layout.minor_version(), layout.has(flags::FREE_THREADED))
    }

    /// The part that the kernel side reads, for running tasks; `None`: a number is too large for it.
    #[must_use]
    pub fn for_kernel(&self, layout: &Layout, awaits: &AwaitLayout) -> Option<Asyncio> {
        let word = |offset: u64| u32::try_from(offset).ok();
        let (coro_frame, coro_points) = match awaits.coroutine {
            CoroutineLayout::Embedded { frame, .. } => (frame, 0),
            CoroutineLayout::Object { frame, .. } => (frame, 1),
        };
        // Before 3.12 no name is a number, and an `int` is laid out differently.
        let has_numbers = layout.minor_version() >= (3, 12);
        Some(Asyncio {
            task_size: word(self.task_size)?,
            task_name: word(self.name)?,
            task_coro: word(self.coro)?,
            coro_frame: word(coro_frame)?,
            coro_points,
            type_flags: word(awaits.type_flags)?,
            type_basicsize: word(self.objects.type_basicsize)?,
            long_tag: if has_numbers { word(awaits.long_tag)? } else { 0 },
            long_digits: word(awaits.long_digit)?,
            dict_used: word(self.objects.dict_used)?,
            keys_nentries: word(self.objects.keys_nentries)?,
            keys_indices: word(self.objects.keys_indices)?,
            ..Asyncio::default()
        })
    }

    fn row(version: (u8, u8), free_threaded: bool) -> Option<Self> {
        let objects = ObjectLayout::row(version, free_threaded)?;
        let wider = if free_threaded { 16 } else { 0 };
        // v3.8.18, v3.9.18, v3.10.13, v3.11.7 and v3.12.1, v3.13.0. The coroutine and the name follow the waiter.
        let (task_size, state, fut_waiter) = match version {
            (3, 8) => (144, 72, 104),
            (3, 9) => (184, 80, 144),
            (3, 10) => (192, 88, 152),
            (3, 11 | 12) => (176, 88, 128),
            (3, 13) => (144, 96, 112),
            _ => return None,
        };
        let (function_qualname, function_closure) = if version < (3, 10) { (104, 48) } else { (40, 72) };
        Some(Self {
            task_size: task_size + wider,
            state: state + wider,
            fut_waiter: fut_waiter + wider,
            coro: fut_waiter + 8 + wider,
            name: fut_waiter + 16 + wider,
            callback0: 24 + wider,
            callbacks: 40 + wider,
            weakref_object: 16 + wider,
            type_base: 256 + wider,
            function_qualname: function_qualname + wider,
            function_closure: function_closure + wider,
            method_self: 24 + wider,
            partial_function: 16 + wider,
            partial_args: 24 + wider,
            cell_ref: 16 + wider,
            var_size: 16 + wider,
            tuple_items: 24 + wider,
            list_items: 24 + wider,
            objects,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::objects::tests::compare;

    #[test]
    fn rows_are_what_the_headers_say() {
        compare(ModuleTasks::row, |row| {
            let values = vec![
                ("weakref_object", row.weakref_object),
                ("type_base", row.type_base),
                ("function_qualname", row.function_qualname),
                ("function_closure", row.function_closure),
                ("method_self", row.method_self),
                ("cell_ref", row.cell_ref),
                ("var_size", row.var_size),
                ("tuple_items", row.tuple_items),
                ("list_items", row.list_items),
            ];
            values.into_iter().map(|(name, value)| (name, value.to_string())).collect()
        });
    }
}
