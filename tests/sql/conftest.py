from tests.sql.support import open_session, pooler, session

__all__ = ["open_session", "pooler", "session"]
