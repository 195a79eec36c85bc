INSERT INTO {{schema}}.definitions (object, shape, checksum, version) VALUES
    {{objects}}
ON CONFLICT (object) DO UPDATE SET
    shape = excluded.shape, checksum = excluded.checksum, version = excluded.version;
