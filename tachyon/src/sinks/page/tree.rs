//! Stacks as one tree, roots first, and the functions of its nodes.

use crate::profile::{Frame, FrameId, Library, Profile, SPECIAL_FILENAME, library, package, package_path};
use crate::sinks::label::{Kind, Label};
use crate::sinks::stacks::{StackId, Stacks};
use crate::sinks::text::{cut, escape_controls};
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// Most bytes of a name.
const LONGEST_NAME: usize = 512;
/// Stands in for stacks that are too rare and too many to be shown separately.
const RARE: &str = "<rare calls, left out>";
/// A stack without frames.
const NO_FRAMES: &str = "<no frames>";

/// A function, as indexes into [`Tree::strings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Function {
    pub kind: Kind,
    pub name: u32,
    pub file: u32,
    /// Where it is, as shown after the name.
    pub place: u32,
    pub module: u32,
}

/// A node: a line of a function that was called by its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    /// Its parent's index, which is less than its own; its own for a root.
    pub parent: u32,
    /// Index of its function.
    pub function: u32,
    /// Running line; 0 if there is none.
    pub line: u32,
    /// Index in [`Tree::positions`] of its place in that line; 0 if there is none, or none is wanted.
    pub position: u32,
}

/// The tree.
#[derive(Debug, Default)]
pub struct Tree {
    pub strings: Vec<String>,
    string_ids: HashMap<String, u32, RandomState>,
    pub functions: Vec<Function>,
    function_ids: HashMap<Function, u32, RandomState>,
    pub nodes: Vec<Node>,
    /// Columns within a line, in UTF-8 bytes: the first, and the one past the last (-1: the line's end). The first
    /// entry means "none".
    pub positions: Vec<(i32, i32)>,
    position_ids: HashMap<(i32, i32), u32, RandomState>,
    /// By stack: its innermost node.
    leaves: Vec<u32>,
}

/// A function, a line of it, and a position in that.
type Place = (u32, u32, u32);
/// Nodes by parent and place.
type Known = HashMap<(u32, Place), u32, RandomState>;

/// The parent of root nodes in [`Tree::child`].
const NO_PARENT: u32 = u32::MAX;

impl Tree {
    /// `by_column`: calls from different places of one line are different nodes.
    pub fn new(profile: &Profile, stacks: &Stacks, by_column: bool) -> Self {
        let mut tree = Self { positions: vec![(-1, -1)], ..Self::default() };
        let mut known = Known::default();
        let mut of_frames: Vec<Option<Place>> = vec![None; profile.frames.len()];
        for stack in stacks.iter() {
            let mut at = NO_PARENT;
            for &frame in stack.iter().rev() {
                let place = *of_frames[frame.0 as usize].get_or_insert_with(|| tree.frame(profile, frame, by_column));
                at = tree.child(&mut known, at, place);
            }
            if stack.is_empty() {
                let function = tree.special(NO_FRAMES);
                at = tree.child(&mut known, at, (function, 0, 0));
            }
            tree.leaves.push(at);
        }
        tree
    }

    /// Puts the nodes in preorder: each is followed by everything below it, and calls from one line are ordered by function and line.
    /// So the page reads related nodes from one place, which for a million nodes determines its speed.
    pub fn sort(&mut self) {
        let parent = |own: usize, node: &Node| (node.parent as usize != own).then_some(node.parent as usize);
        // The children of a node are those between the previous node's end and its own.
        let mut ends = vec![0_usize; self.nodes.len() + 1];
        for (own, node) in self.nodes.iter().enumerate() {
            ends[parent(own, node).map_or(0, |parent| parent + 1)] += 1;
        }
        let mut sum = 0;
        for end in &mut ends {
            sum += std::mem::replace(end, sum);
        }
        let mut children = vec![0_u32; self.nodes.len()];
        for (own, node) in self.nodes.iter().enumerate() {
            let end = &mut ends[parent(own, node).map_or(0, |parent| parent + 1)];
            children[*end] = index(own);
            *end += 1;
        }
        let of = |slot: usize| slot.checked_sub(1).map_or(0, |before| ends[before])..ends[slot];
        for slot in 0..ends.len() {
            children[of(slot)].sort_unstable_by_key(|&child| {
                let Node { function, line, position, .. } = self.nodes[child as usize];
                (function, line, position)
            });
        }
        let mut moved = vec![0_u32; self.nodes.len()];
        let mut nodes = Vec::with_capacity(self.nodes.len());
        let mut open: Vec<u32> = children[of(0)].iter().rev().copied().collect();
        while let Some(old) = open.pop() {
            let (own, node) = (index(nodes.len()), self.nodes[old as usize]);
            moved[old as usize] = own;
            nodes.push(Node { parent: parent(old as usize, &node).map_or(own, |parent| moved[parent]), ..node });
            open.extend(children[of(old as usize + 1)].iter().rev());
        }
        self.nodes = nodes;
        self.leaves.iter_mut().for_each(|leaf| *leaf = moved[*leaf as usize]);
    }

    /// The nodes that stacks end in, in order, and for each stack the index of its node among them.
    pub fn ends(&self) -> (Vec<u32>, Vec<u32>) {
        let mut is_end = vec![false; self.nodes.len()];
        self.leaves.iter().for_each(|&leaf| is_end[leaf as usize] = true);
        let mut places = vec![0_u32; self.nodes.len()];
        let mut ends = Vec::new();
        for node in (0..self.nodes.len()).filter(|&node| is_end[node]) {
            places[node] = index(ends.len());
            ends.push(index(node));
        }
        (ends, self.leaves.iter().map(|&leaf| places[leaf as usize]).collect())
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The innermost node of a stack.
    pub fn leaf(&self, stack: StackId) -> u32 {
        self.leaves[stack.0 as usize]
    }

    /// Leaves out nodes until `most` are left, the rarest first. Their samples go to one node below their parent, so
    /// the remaining nodes keep theirs. `counts`: by stack.
    pub fn prune(&mut self, counts: &[u64], most: usize) {
        let mut totals = vec![0_u64; self.nodes.len()];
        for (&leaf, count) in self.leaves.iter().zip(counts) {
            totals[leaf as usize] += count;
        }
        for place in (0..self.nodes.len()).rev() {
            let parent = self.nodes[place].parent as usize;
            if parent != place {
                totals[parent] += totals[place];
            }
        }
        let mut least = 2;
        // Each parent gets at most one new node, so there must be room for as many as are kept.
        while totals.iter().filter(|&&total| total >= least).count() > most / 2 {
            least *= 2;
        }
        let rare = self.special(RARE);
        let mut known = Known::default();
        let old = std::mem::take(&mut self.nodes);
        let mut moved = vec![0_u32; old.len()];
        for (place, node) in old.iter().enumerate() {
            let parent = if node.parent as usize == place { NO_PARENT } else { moved[node.parent as usize] };
            let below_rare = parent != NO_PARENT && self.nodes[parent as usize].function == rare;
            moved[place] = match totals[place] >= least {
                true => self.child(&mut known, parent, (node.function, node.line, node.position)),
                false if below_rare => parent,
                false => self.child(&mut known, parent, (rare, 0, 0)),
            };
        }
        self.leaves.iter_mut().for_each(|leaf| *leaf = moved[*leaf as usize]);
    }

    fn child(&mut self, known: &mut Known, parent: u32, place: Place) -> u32 {
        *known.entry((parent, place)).or_insert_with(|| {
            let own = index(self.nodes.len());
            let parent = if parent == NO_PARENT { own } else { parent };
            let (function, line, position) = place;
            self.nodes.push(Node { parent, function, line, position });
            own
        })
    }

    /// The columns of a frame, if they are known.
    fn position(&mut self, frame: &Frame) -> u32 {
        let Frame { lineno, end_lineno, column, end_column, .. } = *frame;
        if lineno <= 0 || column < 0 || end_lineno < lineno || end_column < 0 {
            return 0;
        }
        let position = (column, if end_lineno > lineno { -1 } else { end_column });
        *self.position_ids.entry(position).or_insert_with(|| {
            self.positions.push(position);
            index(self.positions.len() - 1)
        })
    }

    fn frame(&mut self, profile: &Profile, frame: FrameId, by_column: bool) -> Place {
        let frame = profile.frames.get(frame);
        let label = Label::of(profile, frame);
        let position = if by_column && label.kind == Kind::Python { self.position(frame) } else { 0 };
        let (name, file) = (self.string(label.function), self.string(label.filename));
        let module = match label.kind {
            Kind::Python => module(label.filename),
            Kind::Native | Kind::Kernel if !label.filename.is_empty() => label.filename.to_owned(),
            Kind::Native | Kind::Kernel | Kind::Special => label.function.to_owned(),
        };
        let module = self.string(&module);
        let place = match label.kind {
            Kind::Python => self.string(package_path(label.filename)),
            Kind::Native => file,
            Kind::Kernel | Kind::Special => self.string(""),
        };
        let function = self.function(Function { kind: label.kind, name, file, place, module });
        (function, label.line.unwrap_or(0), position)
    }

    fn special(&mut self, name: &str) -> u32 {
        let (name, file) = (self.string(name), self.string(""));
        self.function(Function { kind: Kind::Special, name, file, place: file, module: name })
    }

    fn function(&mut self, function: Function) -> u32 {
        *self.function_ids.entry(function).or_insert_with(|| {
            self.functions.push(function);
            index(self.functions.len() - 1)
        })
    }

    /// The index of a text in its displayed form.
    pub fn string(&mut self, text: &str) -> u32 {
        let shown = escape_controls(&cut(text, LONGEST_NAME)).into_owned();
        if let Some(&id) = self.string_ids.get(&shown) {
            return id;
        }
        self.strings.push(shown.clone());
        self.string_ids.insert(shown, index(self.strings.len() - 1));
        index(self.strings.len() - 1)
    }
}

/// The module of a Python file, as in the text report when no distribution metadata is available.
fn module(file: &str) -> String {
    if file.starts_with("<frozen ") {
        return "stdlib".to_owned();
    }
    if file.is_empty() || file == SPECIAL_FILENAME {
        return "<unknown>".to_owned();
    }
    let path = file.replace('\\', "/");
    match library(&path) {
        Some(Library::Site { inside, .. }) => package(inside).to_owned(),
        Some(Library::Standard(_)) => "stdlib".to_owned(),
        None => file.to_owned(),
    }
}

fn index(len: usize) -> u32 {
    u32::try_from(len).expect("fewer than 2^32 things fit in memory")
}
