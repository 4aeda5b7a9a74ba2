//! [`VisitPath`]: where in a module a visitor or a mapper of Burn is.

/// The path to what a visitor or a mapper is at: the names of the fields, outermost first, and the types that they are fields of.
///
/// A visitor keeps one in its field `path`, and [`follow_path!`](crate::follow_path) among its methods.
#[derive(Clone, Debug, Default)]
pub struct VisitPath {
    names: Vec<String>,
    containers: Vec<String>,
}

impl VisitPath {
    /// Goes into a field.
    pub fn enter(&mut self, name: &str, container: &str) {
        self.names.push(name.into());
        self.containers.push(container.into());
    }

    /// Goes back out of the field that was entered last.
    pub fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }

    /// The names of the fields.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The types that they are fields of, such as `Struct:Linear`.
    pub fn containers(&self) -> &[String] {
        &self.containers
    }

    /// The names of the fields, each with the type that it is a field of.
    pub fn fields(&self) -> impl DoubleEndedIterator<Item = (&str, &str)> {
        self.names.iter().map(String::as_str).zip(self.containers.iter().map(String::as_str))
    }

    /// The names of the fields without the last one: the path of the module that a parameter is in.
    pub fn module(&self) -> &[String] {
        self.names.split_last().map_or(&[], |(_field, module)| module)
    }

    /// The names of the fields, with dots between them.
    pub fn joined(&self) -> String {
        self.names.join(".")
    }
}

/// The two methods by which a visitor or a mapper keeps its field `path`, a [`VisitPath`].
#[macro_export]
#[doc(hidden)]
macro_rules! follow_path {
    () => {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
    };
}
