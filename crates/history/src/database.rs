//! Opening a database, and making sure that it is one of ours.

use crate::Error;
use rusqlite::{Connection, OpenFlags};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

/// `PRAGMA application_id`: "PFHI".
const APPLICATION_ID: i64 = 0x5046_4849;

/// `PRAGMA user_version`.
const SCHEMA_VERSION: i64 = 1;

/// Open one to write to, and make it where it is not there or empty: readable by its owner alone.
pub fn open_writable(path: &Path) -> Result<Connection, Error> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(Error::Open(path.to_owned(), error)),
        _ => {}
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(database_error(path, "open"))?;
    connection.busy_timeout(Duration::from_secs(5)).map_err(database_error(path, "open"))?;
    match read_format(&connection).map_err(database_error(path, "read"))? {
        // New, or its maker was killed before the first commit.
        FileFormat::Empty => create_schema(&connection).map_err(database_error(path, "make"))?,
        form => form.check_supported(path)?,
    }
    check_integrity(&connection, path)?;
    Ok(connection)
}

/// Open one to read. Where its directory cannot be written to, only one that nobody writes to can be read.
pub fn open_readable(path: &Path) -> Result<Connection, Error> {
    // The file is not opened here: to close it would let go of locks that this process has on it (fcntl_locking(2)).
    std::fs::metadata(path).map_err(|error| Error::Open(path.to_owned(), error))?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let open = || -> rusqlite::Result<Connection> {
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(Duration::from_secs(5))?;
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(()))?;
        Ok(connection)
    };
    let connection = match open() {
        Ok(connection) => connection,
        Err(error) if is_denied(&error) && !log_path(path).exists() => {
            let uri = format!("file:{}?immutable=1", encode_path(path));
            Connection::open_with_flags(uri, flags | OpenFlags::SQLITE_OPEN_URI)
                .map_err(database_error(path, "open"))?
        }
        Err(error) => return Err(database_error(path, "read")(error)),
    };
    read_format(&connection).map_err(database_error(path, "read"))?.check_supported(path)?;
    Ok(connection)
}

/// The log of a database.
pub fn log_path(path: &Path) -> std::path::PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

/// What an error of the database means for this file.
pub fn database_error(path: &Path, operation: &'static str) -> impl Fn(rusqlite::Error) -> Error {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    move |error| match error.sqlite_error_code() {
        Some(NotADatabase) => Error::NotAHistory(path.to_owned()),
        Some(DatabaseCorrupt) => Error::Damaged(path.to_owned(), error.to_string()),
        _ => Error::Database(path.to_owned(), operation, error),
    }
}

fn create_schema(connection: &Connection) -> rusqlite::Result<()> {
    connection.pragma_update(None, "page_size", 4096)?;
    connection.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()))?;
    // The first commit is all of it, so that nobody ever finds a half.
    connection.execute_batch(&format!(
        "BEGIN IMMEDIATE; {} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;",
        include_str!("schema.sql")
    ))
}

/// What a database says that it is.
enum FileFormat {
    /// Nothing is in it, and nobody has signed it.
    Empty,
    /// The application that signed it, and the version of its form.
    Signed(i64, i64),
}

fn read_format(connection: &Connection) -> rusqlite::Result<FileFormat> {
    let number = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let (application, version) = (number("application_id")?, number("user_version")?);
    let objects: i64 = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    Ok(if (application, version, objects) == (0, 0, 0) {
        FileFormat::Empty
    } else {
        FileFormat::Signed(application, version)
    })
}

impl FileFormat {
    fn check_supported(&self, path: &Path) -> Result<(), Error> {
        match *self {
            Self::Signed(APPLICATION_ID, SCHEMA_VERSION) => Ok(()),
            Self::Signed(APPLICATION_ID, version) => Err(Error::UnknownVersion(path.to_owned(), version)),
            _ => Err(Error::NotAHistory(path.to_owned())),
        }
    }
}

/// Whether each page is where it belongs. It is bounded in size, and so in time.
fn check_integrity(connection: &Connection, path: &Path) -> Result<(), Error> {
    let told: String =
        connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(database_error(path, "check"))?;
    if told == "ok" { Ok(()) } else { Err(Error::Damaged(path.to_owned(), told)) }
}

/// Whether it is the right to write beside the file that is missing.
fn is_denied(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{CannotOpen, PermissionDenied, ReadOnly};
    matches!(error.sqlite_error_code(), Some(CannotOpen | PermissionDenied | ReadOnly))
}

/// A path as part of a URI.
fn encode_path(path: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte);
    let bytes = path.as_os_str().as_encoded_bytes().iter();
    bytes.map(|&byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}
