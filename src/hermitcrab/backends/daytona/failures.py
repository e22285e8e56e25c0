"""What the exceptions of Daytona's SDK mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hermitcrab.backends.clouds.retry import PASSING_STATUSES, Failure, meant, retry_after
from hermitcrab.errors import BackendUnavailable, ConfigError, SandboxLost, SandboxStartError

NAME = "daytona"
KEY = "DAYTONA_API_KEY"
TOKEN, ORGANIZATION = "DAYTONA_JWT_TOKEN", "DAYTONA_ORGANIZATION_ID"
GET_KEY = f"Set {KEY} to a key from https://app.daytona.io/dashboard/keys."


def understood(error: Exception) -> Failure:
    return meant(error, meanings, _failed)


def meanings() -> Mapping[type[BaseException], Callable[[Any], Failure]]:
    """What each exception means that the SDK, or what it is built on, may raise.

    The SDK tries again by itself only where a connection could not be made.
    """
    import aiohttp
    import daytona_analytics_api_client
    import daytona_analytics_api_client_async
    import daytona_api_client
    import daytona_api_client_async
    import daytona_toolbox_api_client
    import daytona_toolbox_api_client_async
    from daytona.common import errors

    passing = partial(_told, passing=True)
    generated = (
        daytona_api_client_async,
        daytona_toolbox_api_client_async,
        daytona_analytics_api_client_async,
        daytona_api_client,
        daytona_toolbox_api_client,
        daytona_analytics_api_client,
    )
    return {
        errors.DaytonaAuthenticationError: _refused_key,
        errors.DaytonaBadRequestError: _refused_setting,
        errors.DaytonaUnprocessableEntityError: _refused_setting,
        errors.DaytonaRateLimitError: _later,
        # The sandbox, or another one of the name, is on the way from one state to another.
        errors.DaytonaConflictError: passing,
        errors.DaytonaQueueTimeoutError: _told,
        errors.DaytonaProcessExecutionTimeoutError: _told,
        errors.DaytonaTimeoutError: passing,
        errors.DaytonaConnectionError: passing,
        errors.DaytonaInternalServerError: passing,
        errors.DaytonaBadGatewayError: passing,
        errors.DaytonaServiceUnavailableError: passing,
        errors.DaytonaSpotEvictedError: _lost,
        errors.DaytonaGoneError: _lost,
        errors.DaytonaError: lambda error: _told(error, passing=error.status_code in PASSING_STATUSES),
        **{
            each.OpenApiException: lambda error: _told(
                error, passing=getattr(error, "status", None) in PASSING_STATUSES
            )
            for each in generated
        },
        aiohttp.ClientError: passing,
        OSError: passing,
    }


def _told(error: Exception, *, passing: bool = False) -> Failure:
    return Failure(_failed(str(error) or type(error).__name__), passing=passing)


def _later(error: Any) -> Failure:
    """A rate limit: nothing happened."""
    headers = {name.lower(): value for name, value in error.headers.items()}
    wait = retry_after(headers.get("retry-after", ""))
    return Failure(_failed(str(error)), refused=True, retry_after=wait)


def _lost(error: Exception) -> Failure:
    return Failure(SandboxLost(f"Daytona: {error}", backend=NAME))


def _refused_setting(error: Exception) -> Failure:
    return Failure(ConfigError(f"Daytona: {error}", backend=NAME))


def _refused_key(error: Exception) -> Failure:
    return Failure(
        BackendUnavailable(f"Daytona refused the key in {KEY} ({error}).", hint=GET_KEY, backend=NAME)
    )


def _failed(words: str) -> SandboxStartError:
    return SandboxStartError(f"Daytona: {words}", backend=NAME)
