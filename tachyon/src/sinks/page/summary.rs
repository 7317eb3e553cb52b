//! The page's summary without its script: the functions with most self time, as HTML. It is shown before the browser has read
//! the data, and if scripts are disabled, and is then replaced by the page.

use super::tree::Tree;
use crate::profile::waited_for;
use crate::sinks::flamegraph::xml;
use crate::sinks::label::Kind;
use std::collections::HashMap;
use std::fmt::Write as _;

/// Most functions.
const SHOWN: usize = 12;

/// Samples of a function and of its hottest line.
#[derive(Default)]
struct Own {
    samples: u64,
    lines: HashMap<u32, u64>,
}

/// The HTML. `counts`: samples by stack; `whole`: what they are part of, e.g. `the CPU time`.
pub(super) fn summary(tree: &Tree, counts: &[u64], whole: &str) -> String {
    let charged = charged(tree);
    let mut own: HashMap<u32, Own> = HashMap::new();
    let mut all = 0;
    for (stack, &count) in (0..).map(crate::sinks::stacks::StackId).zip(counts) {
        all += count;
        // A stack without any Python has no function.
        let Some(node) = charged[tree.leaf(stack) as usize] else { continue };
        let node = tree.nodes[node as usize];
        let own = own.entry(node.function).or_default();
        own.samples += count;
        *own.lines.entry(node.line).or_default() += count;
    }
    let mut rows: Vec<(u32, Own)> = own.into_iter().filter(|(_, own)| own.samples > 0).collect();
    rows.sort_by(|(a, first), (b, second)| second.samples.cmp(&first.samples).then(a.cmp(b)));
    let mut html = String::new();
    for (place, (function, own)) in rows.iter().take(SHOWN).enumerate() {
        let function = tree.functions[*function as usize];
        let [name, file] = [function.name, function.place].map(|text| xml(&tree.strings[text as usize]));
        let hottest = own.lines.iter().max_by_key(|&(line, samples)| (samples, std::cmp::Reverse(line)));
        let line = hottest.filter(|(line, _)| **line > 0).map_or_else(String::new, |(line, _)| format!(":{line}"));
        let file = if file.is_empty() { String::new() } else { format!("{file}{line}") };
        let share = own.samples as f64 * 100.0 / all.max(1) as f64;
        // Writing to a string does not fail.
        if place == 0 {
            let share = if share >= 9.95 { format!("{share:.0}") } else { format!("{share:.1}") };
            let _ = write!(
                html,
                "<section class=\"headline summary\"><p class=\"lead\"><strong>{share} %</strong> of {whole} is in <code>{name}</code> \
                 <span class=\"where\">{file}</span></p></section>\n<table class=\"first\"><thead><tr><th>Self</th><th>Function</th></tr></thead><tbody>\n"
            );
        }
        let _ = writeln!(
            html,
            "<tr><td class=\"share\">{share:.1} %</td><td><code>{name}</code> <span class=\"where\">{file}</span></td></tr>"
        );
    }
    if !rows.is_empty() {
        html.push_str("</tbody></table>");
    }
    html
}

/// By node: the node that its samples are charged to, as in the report; `None`: nothing around it is Python.
fn charged(tree: &Tree) -> Vec<Option<u32>> {
    let mut charged: Vec<Option<u32>> = Vec::with_capacity(tree.nodes.len());
    for (own, node) in (0_u32..).zip(&tree.nodes) {
        let above = if node.parent == own { None } else { charged[node.parent as usize] };
        let function = tree.functions[node.function as usize];
        let waits = || waited_for(&tree.strings[function.name as usize]).is_some();
        charged.push(match function.kind {
            Kind::Native | Kind::Kernel => above,
            Kind::Special if node.parent != own && waits() => above,
            Kind::Python | Kind::Special => Some(own),
        });
    }
    charged
}
