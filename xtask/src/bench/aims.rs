//! A figure of the page, beside the most that it should be.

/// A figure and the most that it should be.
pub(crate) struct Aimed {
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) aim: f64,
    pub(crate) unit: &'static str,
    pub(crate) decimals: usize,
}

impl Aimed {
    pub(crate) fn is_over(&self) -> bool {
        self.value > self.aim
    }

    /// Its row of a table.
    pub(crate) fn shown(&self) -> String {
        let Self { what, value, aim, unit, decimals } = self;
        let verdict = if self.is_over() { "**over**" } else { "ok" };
        format!("| {what} | {value:.decimals$} {unit} | {aim} {unit} | {verdict} |\n")
    }
}
