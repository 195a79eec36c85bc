from tests.sql.support import open_session, session

__all__ = ["open_session", "session"]
