//! Whether a native stack shows that greenlets are being switched, and where it ends as a greenlet's own.

use crate::merge::NativeKind;

/// Beginning of the name of greenlet's library, `_greenlet.cpython-….so`.
pub(super) const GREENLET: &str = "_greenlet.";
/// The function of that library that starts a greenlet (`TGreenlet.cpp`, `TUserGreenlet.cpp`, before 2.0 `greenlet.c`). Its caller,
/// `g_switch`, is a greenlet's first function: what lies below it on the stack belongs to whoever ran there, and is exchanged
/// underneath.
const GREENLET_START: &str = "g_initialstub";
/// Functions there that save a greenlet's stack and Python state: until they are done, both are its own.
const GREENLET_SAVES: [&str; 3] = ["slp_save", "copy_stack_to_heap", "operator<<"];
/// Functions that put another greenlet's stack in its place, byte by byte. (`slp_switch` is written for each processor,
/// and calls both.)
const GREENLET_RESTORES: [&str; 3] = ["slp_restore", "copy_heap_to_stack", "slp_switch"];
/// Functions that call those, and then change the thread state's Python frames.
const GREENLET_EXCHANGES: [&str; 3] = ["g_switchstack", "operator>>", "unexpose_frames"];
/// Calls the first of those, which may be inlined into it.
const GREENLET_SWITCH: &str = "g_switch";
/// What that does once it is over.
const GREENLET_SWITCHED: &str = "g_switch_finish";

/// What a function of greenlet's library does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greenlet {
    /// [`GREENLET_SAVES`].
    Saves,
    /// [`GREENLET_RESTORES`].
    Restores,
    /// [`GREENLET_EXCHANGES`].
    Exchanges,
    /// [`GREENLET_SWITCH`].
    Switches,
    /// [`GREENLET_START`].
    Starts,
    /// Anything else: its caller has not exchanged anything yet, or is done.
    Other,
    /// An entry of the procedure linkage table, or any function where there is no symbol table.
    Nameless,
}

/// How far one greenlet has given way to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exchange {
    /// Both stacks are one greenlet's.
    Apart,
    /// The native stack is being overwritten.
    Restoring,
    /// The native stack may belong to one greenlet and the Python stack to the other.
    UnderWay,
}

impl Greenlet {
    pub fn of(function: Option<&str>) -> Self {
        let Some(function) = function else { return Self::Nameless };
        let is_of = |parts: &[&str]| parts.iter().any(|part| function.contains(part));
        if is_of(&GREENLET_SAVES) {
            Self::Saves
        } else if is_of(&GREENLET_RESTORES) {
            Self::Restores
        } else if is_of(&GREENLET_EXCHANGES) {
            Self::Exchanges
        } else if function.contains(GREENLET_START) {
            Self::Starts
        } else if function.contains(GREENLET_SWITCH) && !function.contains(GREENLET_SWITCHED) {
            Self::Switches
        } else {
            Self::Other
        }
    }
}

/// What code of greenlet's library has been met, leaf first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Met {
    #[default]
    Nothing,
    /// Some in the innermost activation, none with a name.
    Nameless,
    Named,
}

/// What a stack shows, frame by frame, leaf first.
#[derive(Debug, Default)]
pub(in crate::recording) struct Switch {
    /// It has code that switches between stacks, and what lies further out may be another greenlet's.
    pub foreign: bool,
    /// It has been followed to the first function of a greenlet, where it ends.
    pub rooted: bool,
    /// What the innermost function shows that shows anything.
    exchange: Option<Exchange>,
    met: Met,
    /// How many frames such code and its callees are, in the innermost activation.
    frames: usize,
}

impl Switch {
    /// Takes a frame of greenlet's library, with `kinds` before it: the innermost one that says anything about an exchange decides
    /// whether it is under way. One without a name says nothing, so its caller decides; if none has a name, it may be. `no_frame`: the
    /// thread state has no Python frame.
    pub(super) fn meet(&mut self, greenlet: Greenlet, kinds: &[NativeKind], no_frame: bool) {
        self.foreign = true;
        let activation = |kind: &NativeKind| matches!(kind, NativeKind::Evaluator { .. } | NativeKind::Handler);
        let called_python = kinds.iter().any(activation);
        if !called_python {
            self.frames = kinds.len() + 1;
        }
        if greenlet == Greenlet::Nameless {
            if self.met == Met::Nothing && !called_python {
                self.met = Met::Nameless;
            }
            return;
        }
        let innermost = std::mem::replace(&mut self.met, Met::Named) != Met::Named;
        if !called_python {
            self.exchange = self.exchange.or(match greenlet {
                Greenlet::Saves => Some(Exchange::Apart),
                Greenlet::Restores => Some(Exchange::Restoring),
                Greenlet::Exchanges => Some(Exchange::UnderWay),
                Greenlet::Switches if innermost => Some(Exchange::UnderWay),
                Greenlet::Switches | Greenlet::Starts | Greenlet::Other | Greenlet::Nameless => None,
            });
        }
        if greenlet == Greenlet::Starts {
            // Without Python frames, as in the thread state, the stack is whole: the greenlet has not called Python yet, or no
            // longer does. With Python frames but no call into Python, it is its starter, whose stack goes on below.
            let without_python = no_frame && !called_python && self.exchange != Some(Exchange::Restoring);
            if without_python {
                self.exchange = Some(Exchange::Apart);
            }
            self.rooted |=
                without_python || (called_python && self.exchange.is_none_or(|exchange| exchange == Exchange::Apart));
        }
    }

    /// The stack ends with these frames, at a greenlet's first function: all of it belongs to that greenlet. While its first evaluator
    /// is being entered it runs nothing yet: any Python frames are still those of whoever started it.
    pub(super) fn ends(&mut self, kinds: &[NativeKind], no_frame: bool) {
        let mut evaluators = kinds.iter().filter_map(|kind| match kind {
            NativeKind::Evaluator { entering } => Some(*entering),
            _ => None,
        });
        if evaluators.next() == Some(true) && evaluators.next().is_none() && !no_frame {
            (self.exchange, self.frames) = (Some(Exchange::UnderWay), kinds.len());
        }
        self.foreign = false;
    }

    /// How many frames belong to a switch that is under way, so that what lies behind them may be another greenlet's than the
    /// Python frames. `None`: both are one greenlet's.
    pub fn under_way(&self) -> Option<usize> {
        let exchanges = self.exchange.is_some_and(|exchange| exchange != Exchange::Apart);
        (exchanges || self.met == Met::Nameless).then_some(self.frames)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a stack shows; `E`: an evaluator, `e`: one that is being entered, `n`: other code, else a function of greenlet's library.
    fn shown(stack: &[&str], no_frame: bool) -> (Option<usize>, bool) {
        let (mut switch, mut kinds) = (Switch::default(), Vec::new());
        for &function in stack {
            let root = switch.rooted;
            kinds.push(match function {
                "E" | "e" => NativeKind::Evaluator { entering: function == "e" },
                "n" => NativeKind::Other,
                _ => {
                    switch.meet(Greenlet::of(Some(function).filter(|name| !name.is_empty())), &kinds, no_frame);
                    NativeKind::Other
                }
            });
            if root {
                switch.ends(&kinds, no_frame);
                break;
            }
        }
        (switch.under_way(), switch.rooted)
    }

    #[test]
    fn the_innermost_function_that_says_anything_decides() {
        let restores =
            ["n", "greenlet::Greenlet::slp_restore_state", "g_switchstack", "g_switch", "green_switch", "n", "E"];
        let saves = ["greenlet::PythonState::operator<<", "g_switchstack", "g_switch", "E"];
        let arrives =
            ["greenlet::PythonState::unexpose_frames", "operator>>", "g_switchstack_success", "g_switchstack", "E"];
        for (stack, under_way) in [
            (&restores[..], Some(5)),
            (&saves, None),
            (&arrives, Some(4)),
            // It may have been inlined.
            (&["g_switch", "green_switch", "E"], Some(2)),
            (&["PyErr_Occurred", "g_switch_finish", "g_switch", "E"], None),
            (&["greenlet::StackState::StackState", "greenlet::Greenlet::Greenlet", "green_new", "n", "E"], None),
            // Entries of the linkage table, and a library without symbols.
            (&["", "greenlet::IsShuttingDown", "PyGreenlet_GetCurrent", "n", "E"], None),
            (&["", "g_switchstack", "g_switch", "E"], Some(3)),
            (&["", "", "n", "E", ""], Some(2)),
            (&["E", "", "E"], None),
            (&["E", "g_switchstack", "E"], None),
        ] {
            assert_eq!(shown(stack, false), (under_way, false), "{stack:?}");
        }
    }

    #[test]
    fn a_greenlets_stack_ends_at_its_first_function() {
        let first = ["greenlet::UserGreenlet::g_initialstub", "g_switch", "n", "E"];
        let with = |before: &[&'static str]| [before, &first[..]].concat();
        assert_eq!(shown(&with(&["n", "E", "inner_bootstrap"]), false), (None, true));
        // It is being entered: the Python frames are its starter's.
        assert_eq!(shown(&with(&["e", "inner_bootstrap"]), false), (Some(4), true));
        assert_eq!(shown(&with(&["e", "inner_bootstrap"]), true), (None, true));
        // It has not called Python, and the thread state knows.
        assert_eq!(shown(&with(&[]), true), (None, true));
        assert_eq!(shown(&with(&[]), false), (None, false));
        assert_eq!(shown(&with(&["slp_restore_state"]), true), (Some(3), false));
    }
}
