//! Rules.

use super::SettingRule;

pub(super) const RULES: &[SettingRule] = &[];
