-- What each instance holds for itself, beside the common database.
CREATE TABLE own (key INTEGER PRIMARY KEY, value BLOB);
