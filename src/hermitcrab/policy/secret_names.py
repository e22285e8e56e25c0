"""The list of what looks like a secret, as data. `docs/environment-policy.md` explains it.

A pattern is a name, with `*` at its beginning, its end or both; case does not matter. Settings add to it
(`secret_names`) and take from it (`harmless_names`).
"""

WORDS = (
    *("*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*_PASS", "*_PWD", "*_PW", "PASS", "SSHPASS"),
    *("*SECRET*", "*CREDENTIAL*", "*_CREDS", "*_CREDS_*", "*SERVICE_ACCOUNT*"),
    *("*TOKEN", "*_TOKEN_*", "*API_TOKEN*", "*ACCESS_TOKEN*", "*AUTH_TOKEN*", "*AUTHTOKEN*"),
    *("*_JWT", "JWT", "*_PAT", "*BEARER*", "*_COOKIE", "*_OAUTH"),
    *("*_KEY", "*_KEYS", "*APIKEY*", "*API_KEY*", "*ACCESS_KEY*", "*PRIVATE_KEY*", "*_KEY_BASE64", "*_PEM"),
    *("*AUTHKEY*", "*ACCESSKEY*", "*PRIVATEKEY*"),
    *("AUTH", "AUTHORIZATION", "*_AUTH", "*__AUTH", "*_AUTH_CONFIG", "*_DSN", "*MNEMONIC*", "*SEED_PHRASE*"),
    *("*CONNECTION_STRING*", "*_CONN_STR", "*WEBHOOK_URL*", "*_WEBHOOK"),
)
"""What people call passwords, tokens, keys and the like, whoever they belong to."""

PROVIDERS = (
    *("AWS_*", "AZURE_*", "ARM_CLIENT_*", "CLOUDSDK_AUTH_*", "GCP_SA_*", "OCI_CLI_*", "OS_APPLICATION_*"),
    *("OP_SESSION_*", "BW_SESSION", "LPASS_*", "SOPS_AGE_*", "DOPPLER_*", "INFISICAL_*"),
    *("VSCODE_GIT_IPC_HANDLE", "VSCODE_GIT_ASKPASS_*"),
)
"""Families in which some names tell nothing: clouds, password managers, an editor that logs in for `git`."""

OWN = ("HERMITCRAB_ENV",)
"""Settings of ours that may hold a secret under a name that does not say so."""

SECRET = (*WORDS, *PROVIDERS, *OWN)

HARMLESS = (
    *("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_DEFAULT_OUTPUT"),
    *("AWS_CONFIG_FILE", "AWS_PAGER", "AWS_CA_BUNDLE", "AWS_ENDPOINT_URL*", "AWS_SDK_LOAD_CONFIG"),
    *("AWS_EC2_METADATA_DISABLED", "AZURE_CONFIG_DIR", "AZURE_CORE_*", "AZURE_HTTP_USER_AGENT"),
    *(
        "PASSWORD_STORE_DIR",
        "HERMITCRAB_SECRET_NAMES",
        "HERMITCRAB_CREDENTIALS",
        "HERMITCRAB_CREDENTIAL_HOME",
    ),
)
"""What a pattern above would take and is no secret. Without its profile or endpoint a cloud's program would
go on with another account."""

VALUES = (
    r"://[^/?#\s:@]*:[^/\s@]+@",  # a URL with a password
    r"(?:^|[;\s])(?:password|pwd)=[^;\s]",  # a database's connection string
    r"^(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|xapp-|npm_|pypi-|dop_v1_|shpat_|hf_)[\w-]{16}",
    r"^(?:sk|rk|pk)[-_](?:[\w-]+[-_])?\w{16}|^AIza[\w-]{30}|^(?:AKIA|ASIA)[A-Z0-9]{16}$",
    r"^eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.",  # a JSON web token
    r"-----BEGIN [A-Z ]*PRIVATE KEY",
)
"""What makes a value a secret under any name. Regular expressions, found anywhere, in any case."""
