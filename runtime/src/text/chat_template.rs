//! Chat templates: Jinja as `transformers` runs it, bounded.
//!
//! A template comes with the model, from an author nobody checked. It can loop, grow strings and
//! recurse; it can not read files or reach the network. Rendering has a budget of steps (minijinja's
//! fuel, which also counts bytes) and a bound on its output, both in proportion to the input.

use super::TextError;
use super::python_json::{DumpOptions, dumps, float_repr};
use super::strftime::UtcTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, escape_formatter};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::io;

/// Steps that every rendering may take. The longest published templates take some 10,000 for a chat.
const BASE_FUEL: u64 = 2_000_000;
/// Further steps per byte of input; a step pays for 64 bytes of data that the template moves.
const FUEL_PER_INPUT_BYTE: u64 = 2;
/// Output that every rendering may write, in bytes.
const BASE_OUTPUT_BYTES: u64 = 1 << 20;
/// Further output per byte of input.
const OUTPUT_PER_INPUT_BYTE: u64 = 4;
/// Nesting of macro calls and includes.
const RECURSION_LIMIT: usize = 64;

const TEMPLATE_NAME: &str = "chat_template";

/// What a template is given.
#[derive(Debug, Clone, Default)]
pub struct ChatInput {
    /// Messages as an array of objects with `role` and `content`.
    pub messages: Json,
    /// Tool definitions, an array, or null.
    pub tools: Json,
    /// Whether to end with the marker that starts the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`.
    pub extra: serde_json::Map<String, Json>,
}

impl ChatInput {
    /// Bytes of text in the input, for the budgets.
    fn text_bytes(&self) -> u64 {
        fn count(value: &Json) -> u64 {
            match value {
                Json::String(text) => text.len() as u64,
                Json::Array(items) => items.iter().map(count).sum(),
                Json::Object(fields) => fields.iter().map(|(name, field)| name.len() as u64 + count(field)).sum(),
                _ => 8,
            }
        }
        count(&self.messages) + count(&self.tools) + self.extra.values().map(count).sum::<u64>()
    }
}

/// A compiled chat template with its model's special tokens.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: BTreeMap<String, String>,
}

/// What `raise_exception` was called with; found again at the bottom of minijinja's error chain.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedByTemplate(String);

impl ChatTemplate {
    /// Compiles `source`. `special_tokens` are variables such as `bos_token`.
    ///
    /// # Errors
    /// [`TextError::Asset`] with the line where the template is not valid.
    pub fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|error| TextError::Template(describe(&error)))?,
        );
        environment.set_recursion_limit(RECURSION_LIMIT);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(print_as_python);
        environment.add_test("iterable", is_iterable);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: &str| UtcTime::now().format(format));
        environment
            .add_template_owned(TEMPLATE_NAME, without_generation_tags(source))
            .map_err(|error| TextError::Asset { asset: "chat_template.jinja", reason: describe(&error) })?;
        Ok(Self { environment, source: source.to_owned(), special_tokens })
    }

    /// The template as the bundle holds it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TextError::TemplateRefused`] where the template raised an exception of its own,
    /// [`TextError::TemplateLimit`] where it exceeded its budget, [`TextError::Template`] otherwise.
    pub fn render(&self, input: &ChatInput) -> Result<String, TextError> {
        let input_bytes = input.text_bytes();
        let fuel = BASE_FUEL.saturating_add(input_bytes.saturating_mul(FUEL_PER_INPUT_BYTE));
        let limit = BASE_OUTPUT_BYTES.saturating_add(input_bytes.saturating_mul(OUTPUT_PER_INPUT_BYTE));
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let template =
            environment.get_template(TEMPLATE_NAME).map_err(|error| TextError::Template(describe(&error)))?;

        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        for (name, token) in &self.special_tokens {
            context.insert(name, Value::from(token.as_str()));
        }
        for (name, value) in &input.extra {
            context.insert(name, Value::from(Serde(value)));
        }
        context.insert("messages", Value::from(Serde(&input.messages)));
        context.insert("add_generation_prompt", Value::from(input.add_generation_prompt));
        // `transformers` passes None, not an undefined name, where there are no tools.
        context.insert("tools", Value::from(Serde(&input.tools)));
        context.insert("documents", Value::from(()));

        let mut output = BoundedOutput { bytes: Vec::new(), limit, exceeded: false };
        let rendered = template.render_captured_to(Value::from(context), &mut output).map(drop);
        if output.exceeded {
            return Err(TextError::TemplateLimit { what: "bytes of output", limit });
        }
        match rendered {
            Ok(()) => String::from_utf8(output.bytes).map_err(|error| TextError::Template(error.to_string())),
            Err(error) if error.kind() == ErrorKind::OutOfFuel => {
                Err(TextError::TemplateLimit { what: "steps", limit: fuel })
            }
            Err(error) => {
                Err(raised(&error).map_or_else(|| TextError::Template(describe(&error)), TextError::TemplateRefused))
            }
        }
    }
}

/// A writer that stops at a limit.
struct BoundedOutput {
    bytes: Vec<u8>,
    limit: u64,
    exceeded: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if (self.bytes.len() + data.len()) as u64 > self.limit {
            self.exceeded = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Floats as Python's `repr` writes them; everything else is minijinja's business.
fn print_as_python(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if value.kind() == ValueKind::Number
        && !value.is_integer()
        && let Ok(float) = f64::try_from(value.clone())
    {
        return out.write_str(&float_repr(float)).map_err(Error::from);
    }
    escape_formatter(out, state, value)
}

/// Python can iterate over an undefined name, but not over None.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.is_undefined() || value.try_iter().is_ok())
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception was called").with_source(RaisedByTemplate(message)))
}

/// `tojson` of `transformers`: `json.dumps`, not HTML-escaped as Jinja's own filter is.
fn tojson(state: &State<'_, '_>, value: Value, arguments: Kwargs) -> Result<Value, Error> {
    let json = serde_json::to_value(&value)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, "value is not JSON").with_source(error))?;
    /// Wider indents only serve to exhaust memory.
    const MAX_INDENT: usize = 16;
    let indent: Option<usize> = arguments.get("indent")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let options = DumpOptions {
        indent: indent.map(|indent| indent.min(MAX_INDENT)),
        ensure_ascii: arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: match separators.as_deref() {
            Some([item, key]) => Some((item.clone(), key.clone())),
            Some(_) => {
                let reason = "separators is a pair of strings";
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
            None => None,
        },
    };
    arguments.assert_all_used()?;
    let text = dumps(&json, &options);
    // The engine charges for what its own filters write; this one charges for itself, at the price of
    // its built-in counterpart: 16 bytes' worth for each byte of JSON.
    state.consume_fuel(text.len() as u64 / 4)?;
    Ok(Value::from_safe_string(text))
}

/// Removes `{% generation %}` and `{% endgeneration %}`, an extension of `transformers` that marks the
/// assistant's tokens for training and writes nothing. The whitespace control of the tags is kept by
/// leaving an empty comment with the same dashes.
fn without_generation_tags(source: &str) -> String {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let end = start + length + 2;
        let inner = &rest[start + 2..end - 2];
        let word = inner.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        output.push_str(&rest[..start]);
        if word == "generation" || word == "endgeneration" {
            output.push_str("{%");
            output.push_str(if inner.starts_with('-') { "-" } else { "" });
            output.push_str(" if true ");
            output.push_str("%}{% endif ");
            output.push_str(if inner.ends_with('-') { "-" } else { "" });
            output.push_str("%}");
        } else {
            output.push_str(&rest[start..end]);
        }
        rest = &rest[end..];
    }
    output.push_str(rest);
    output
}

fn raised(error: &Error) -> Option<String> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(RaisedByTemplate(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        cause = error.source();
    }
    None
}

/// The error with its line and its causes, in one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, input: &ChatInput) -> Result<String, TextError> {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        ChatTemplate::new(source, tokens)?.render(input)
    }

    fn hello() -> ChatInput {
        ChatInput {
            messages: json!([{"role": "user", "content": " Hello "}]),
            add_generation_prompt: true,
            ..ChatInput::default()
        }
    }

    #[test]
    fn python_idioms_work() {
        let cases = [
            ("{{ bos_token }}{{ messages[0]['content'].strip() }}", "<s>Hello"),
            ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content= Hello ;"),
            ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": " Hello "}"#),
            ("{{ [1, '<b>'] | tojson(indent=1) }}", "[\n 1,\n \"<b>\"\n]"),
            ("{{ messages[-1].role.startswith('us') }}", "True"),
            ("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "1",
            ),
            ("{% if tools is none %}none{% endif %}{% if tools is defined %}defined{% endif %}", "nonedefined"),
            ("{% generation %}a{% endgeneration %}", "a"),
            ("a {%- generation -%} b {%- endgeneration -%} c", "abc"),
            ("{{ 'x' if add_generation_prompt else 'y' }}\n", "x"),
            ("{{ 1e22 }} {{ 0.5 }} {{ 3.0 }} {{ 7 }} {{ 1 / 4 }}", "1e+22 0.5 3.0 7 0.25"),
            ("{{ none is iterable }} {{ 'a' is iterable }} {{ 5 is iterable }}", "False True False"),
            ("{% if messages[0]['content'] is string %}s{% endif %}\nt", "st"),
        ];
        for (source, expected) in cases {
            assert_eq!(render(source, &hello()).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn dates_can_be_printed() {
        let year = render("{{ strftime_now('%Y') }}", &hello()).unwrap();
        assert!(year.parse::<u32>().unwrap() >= 2024);
    }

    #[test]
    fn refusals_carry_the_authors_words() {
        let error = render("{{ raise_exception('roles must alternate') }}", &hello()).unwrap_err();
        assert!(matches!(&error, TextError::TemplateRefused(words) if words == "roles must alternate"));
        let nested = "{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}";
        assert!(matches!(render(nested, &hello()), Err(TextError::TemplateRefused(_))));
    }

    #[test]
    fn broken_templates_are_named() {
        let error = render("{% for %}", &hello()).unwrap_err();
        assert!(matches!(error, TextError::Asset { .. }), "{error}");
        let error = render("{{ messages.nope.nope }}", &hello()).unwrap_err();
        assert!(matches!(error, TextError::Template(_)), "{error}");
        assert!(matches!(render("{{ 1 | nope }}", &hello()), Err(TextError::Asset { .. } | TextError::Template(_))));
    }

    #[test]
    fn hostile_templates_are_bounded() {
        let doubling = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}";
        let looping = "{% for i in range(10000) %}{% for j in range(10000) %}{% for k in range(10000) %}{% endfor %}{% endfor %}{% endfor %}";
        let writing = "{% for i in range(100000) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}";
        let recursing = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
        let serialising = "{% for i in range(100000) %}{% set x = messages | tojson(indent=1000000) %}{% endfor %}";
        let repeating = "{{ 'a' * 1000000000 * 1000000000 }}";
        let started = std::time::Instant::now();
        for source in [doubling, looping, writing, recursing, serialising, repeating] {
            let error = render(source, &hello()).unwrap_err();
            assert!(matches!(error, TextError::TemplateLimit { .. } | TextError::Template(_)), "{error}");
        }
        assert!(started.elapsed().as_secs() < 20);
    }
}
