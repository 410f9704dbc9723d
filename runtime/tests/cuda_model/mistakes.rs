//! Mistakes that a forward pass could have are not taken for rounding. On the CPU alone.

use crate::models::{changed_cpu, config, cpu};
use crate::{bundles, noise, reference, rows};
use vt_bundle::Bundle;
use vt_run::model::ModelConfig;
use vt_run::model::config::Activation;

/// A mistake, and what it makes of a configuration; `false` where it changes nothing there.
type Mistake = (&'static str, fn(&mut ModelConfig) -> bool);

const MISTAKES: [Mistake; 6] = [
    ("scores 10 % too large", |c| {
        c.attention_scale *= 1.1;
        true
    }),
    ("one layer sees 8 positions", |c| {
        let layer = c.layers.get_mut(1);
        layer.map(|layer| layer.window = Some(8)).is_some()
    }),
    ("one layer turns by another rotary embedding", |c| {
        let (several, middle) = (c.ropes.len() == 2, c.layers.len() / 2);
        if several {
            c.layers[middle].rope = 1 - c.layers[middle].rope;
        }
        several
    }),
    ("the other gate", |c| {
        c.activation = match c.activation {
            Activation::Silu => Activation::GeluTanh,
            Activation::GeluTanh => Activation::Silu,
        };
        true
    }),
    ("a soft cap of scores that is not there", |c| c.attention_softcap.replace(1.0).is_none()),
    ("embeddings a fifth too small", |c| {
        c.embedding_scale *= 0.8;
        true
    }),
];

#[test]
fn mistakes_are_not_rounding() {
    for path in bundles() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // In a mixture of experts the comparison is by a device's choice of experts.
        let Some(original) = config(&Bundle::open(&path).unwrap()).ok().filter(|config| config.moe.is_none()) else {
            continue;
        };
        let (text, expected) = reference(&mut cpu(&path));
        let noise = noise(&path, &text, &expected);
        let mut seen = 0;
        for (what, change) in MISTAKES {
            if !change(&mut original.clone()) {
                continue;
            }
            let apply = |config: &mut ModelConfig| {
                change(config);
            };
            let changed = rows(&mut changed_cpu(&path, None, &apply), &text);
            if changed == expected {
                eprintln!("{name}, {what}: no different here");
                continue;
            }
            seen += 1;
            let judged = noise.judge(&expected, &changed);
            eprintln!("{name}, {what}: {judged}");
            assert!(!judged.is_rounding(), "{name}: {what} is taken for rounding");
        }
        assert!(seen >= 2, "{name}: {seen} mistakes change anything");
    }
}
