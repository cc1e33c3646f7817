//! Opens a database, and verifies that it is a Pagefold history.

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
pub(crate) const SCHEMA_VERSION: i64 = 2;

/// Open a database for writing. Creates it if it is missing or empty, readable by its owner only.
pub fn open_writable(path: &Path) -> Result<Connection, Error> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(Error::Open(path.to_owned(), error)),
        _ => {}
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(database_error(path, "open"))?;
    connection.busy_timeout(Duration::from_secs(5)).map_err(database_error(path, "open"))?;
    match read_format(&connection).map_err(database_error(path, "read"))? {
        // A new file, or its creator was killed before the first commit.
        FileFormat::Empty => create_schema(&connection).map_err(database_error(path, "make"))?,
        format => format.check_supported(path)?,
    }
    check_integrity(&connection, path)?;
    Ok(connection)
}

/// Open a database for reading. If its directory is not writable, it can be read only while no process writes to it.
pub fn open_readable(path: &Path) -> Result<Connection, Error> {
    // The file is not opened here, because closing it would release this process's locks on it (fcntl_locking(2)).
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

/// The path of a database's log.
pub fn log_path(path: &Path) -> std::path::PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

/// Convert an error of the database for this file.
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
    // The first commit has the whole schema, so no process ever finds a part of it.
    connection.execute_batch(&format!(
        "BEGIN IMMEDIATE; {} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;",
        include_str!("schema.sql")
    ))
}

/// The format that a database declares.
enum FileFormat {
    /// Empty, without an application ID.
    Empty,
    /// The application ID and the format version.
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

/// Check the structure of all pages. The database size is limited, so the time is, too.
fn check_integrity(connection: &Connection, path: &Path) -> Result<(), Error> {
    let integrity: String =
        connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(database_error(path, "check"))?;
    if integrity == "ok" { Ok(()) } else { Err(Error::Damaged(path.to_owned(), integrity)) }
}

/// Whether the missing permission is for creating the file beside the database.
fn is_denied(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{CannotOpen, PermissionDenied, ReadOnly};
    matches!(error.sqlite_error_code(), Some(CannotOpen | PermissionDenied | ReadOnly))
}

/// A path as part of a URI.
fn encode_path(path: &Path) -> String {
    let is_unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte);
    let bytes = path.as_os_str().as_encoded_bytes().iter();
    bytes.map(|&byte| if is_unreserved(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}
