#!/bin/sh
# A broker that is also a controller. Its folder is formatted once. Its settings come from the environment:
# KAFKA_NODE, KAFKA_NODES ("1@kafka-1:9093,…"), KAFKA_CLUSTER_ID, KAFKA_EXTERNAL (host:port as seen from outside).
set -eu
home=/var/lib/kafka
cat >"$home/server.properties" <<END
process.roles=broker,controller
node.id=$KAFKA_NODE
controller.quorum.voters=$KAFKA_NODES
controller.listener.names=CONTROLLER
inter.broker.listener.name=INTERNAL
listeners=INTERNAL://:9092,CONTROLLER://:9093,EXTERNAL://:19092
advertised.listeners=INTERNAL://$(hostname):9092,EXTERNAL://$KAFKA_EXTERNAL
listener.security.protocol.map=INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT,EXTERNAL:PLAINTEXT
log.dirs=$home/data
auto.create.topics.enable=false
message.max.bytes=2097152
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=3
share.coordinator.state.topic.min.isr=2
group.initial.rebalance.delay.ms=0
log.retention.check.interval.ms=60000
log.cleaner.dedupe.buffer.size=16777216
num.network.threads=2
num.io.threads=4
background.threads=2
END
cat >"$home/log4j2.properties" <<'END'
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
# Before the other brokers have started, each broker tries to reach them many times a second.
logger.network.name = org.apache.kafka.clients.NetworkClient
logger.network.level = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss,SSS} %p %c{1} %m%n%ex
END
if [ ! -e "$home/data/meta.properties" ]; then
    java -XX:TieredStopAtLevel=1 -Dlog4j2.level=WARN -cp '/opt/tideline/jars/broker/*' kafka.tools.StorageTool format --ignore-formatted \
        --cluster-id="$KAFKA_CLUSTER_ID" --config "$home/server.properties"
fi
exec java "-Xmx${KAFKA_HEAP:-384m}" "-Xms${KAFKA_HEAP:-384m}" -XX:+UseG1GC -XX:+ExitOnOutOfMemoryError \
    "-Dlog4j2.configurationFile=$home/log4j2.properties" -cp '/opt/tideline/jars/broker/*' \
    kafka.Kafka "$home/server.properties"
