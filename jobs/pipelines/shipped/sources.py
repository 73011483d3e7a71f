"""Every source topic and the form of its records."""

from jobs.pipelines.source import Field, Format, Source

NUMBERS = Source(
    name="numbers",
    description="Numbers of many series: the Kafka key names the series. Records with the same id all count.",
    format=Format.JSON,
    key="key",
    fields=(
        Field(name="id", type="BIGINT"),
        Field(name="ts", type="BIGINT"),
        Field(name="value", type="DECIMAL(18,6)"),
    ),
    event_time_field="ts",
)

LINES = Source(
    name="lines",
    description="Lines of plain text. Event time is the header `ts`, else the arrival.",
    format=Format.TEXT,
    fields=(Field(name="text", type="STRING"),),
    event_time_header="ts",
    keyed=False,
)

CLICKS = Source(
    name="clicks",
    description="Page views of users.",
    format=Format.JSON,
    fields=(
        Field(name="user", type="STRING"),
        Field(name="ts", type="BIGINT"),
        Field(name="page", type="STRING"),
    ),
    event_time_field="ts",
)

ORDERS = Source(
    name="orders",
    description="Orders of customers.",
    format=Format.JSON,
    fields=(
        Field(name="order_id", type="STRING"),
        Field(name="customer", type="STRING"),
        Field(name="ts", type="BIGINT"),
        Field(name="amount", type="DECIMAL(18,6)"),
    ),
    event_time_field="ts",
    identity=("order_id",),
)

PAYMENTS = Source(
    name="payments",
    description="Payments of orders.",
    format=Format.JSON,
    fields=(
        Field(name="payment_id", type="STRING"),
        Field(name="order_id", type="STRING"),
        Field(name="ts", type="BIGINT"),
        Field(name="amount", type="DECIMAL(18,6)"),
    ),
    event_time_field="ts",
    identity=("payment_id",),
)

RAW_DATA = Source(
    name="raw_data",
    description="Device readings as CSV lines without a header.",
    format=Format.CSV,
    fields=(
        Field(name="ts", type="BIGINT"),
        Field(name="device", type="STRING"),
        Field(name="metric", type="STRING"),
        Field(name="value", type="DECIMAL(18,6)"),
    ),
    event_time_field="ts",
)
