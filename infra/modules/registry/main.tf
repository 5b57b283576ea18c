variable "prefix" {
  description = "Begins the repositories' names, as the overlays have them."
  type        = string
}

variable "images" {
  type = set(string)
}

variable "key_arn" {
  type = string
}

variable "keep_data" {
  description = "Refuse to destroy a repository that has images."
  type        = bool
}

resource "aws_ecr_repository" "this" {
  for_each             = var.images
  name                 = "${var.prefix}/${each.value}"
  image_tag_mutability = "IMMUTABLE" # a tag in a manifest, a checkpoint's producer or a rollback means one image for ever
  force_delete         = !var.keep_data
  image_scanning_configuration {
    scan_on_push = true
  }
  encryption_configuration {
    encryption_type = "KMS"
    kms_key         = var.key_arn
  }
}

# Nothing that has a tag ever goes by itself. A push gives every image a tag, which nobody can move: a node that is replaced
# months into a run pulls its image by digest, a rollback pulls one of the file system's history, and ECR knows of neither.
# A rule by age or number would take those first.
resource "aws_ecr_lifecycle_policy" "this" {
  for_each   = aws_ecr_repository.this
  repository = each.value.name
  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "Images whose tag somebody deleted, and layers of broken pushes"
      selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 14 }
      action       = { type = "expire" }
    }]
  })
}

output "repositories" {
  description = "Names by image."
  value       = { for image, repository in aws_ecr_repository.this : image => repository.name }
}
